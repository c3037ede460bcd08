"""A small server of the hub's HTTP protocol: repositories of files at one commit each, on this machine's loopback."""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """Files by name at `COMMIT`.

    Attributes:
        status: what every request for a file is answered with: 200, 401 (private) or 403 (gated).
        broken: names of files whose first download stops half way.
    """

    files: dict[str, bytes]
    status: int = 200
    broken: set[str] = field(default_factory=set)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object):
        """Print nothing where a client goes away."""


class Hub:
    """The server; `log` has a line for each request: method, path, status, and the range that it asked for."""

    def __init__(self, repositories: dict[str, Repository]):
        self.repositories, self.log = repositories, list[str]()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object):
        self._server.shutdown()
        self._server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: Hub

    def log_message(self, *_: object):
        """Print nothing."""

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def do_POST(self):
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool):
        path = unquote(urlparse(self.path).path)
        resolve = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        kinds = r"(revision|tree|paths-info)"
        api = re.fullmatch(rf"/api/(?:models/|(datasets/))([^/]+/[^/]+)(?:/{kinds}/([^/]+)(?:/(.*))?)?", path)
        if resolve:
            self._file(*resolve.groups(), with_body=with_body)
        elif api:
            self._describe((api[1] or "") + api[2], api[3] or "revision", api[4] or "main", api[5] or "")
        else:
            self._send(404, b"", {})

    def _refuse(self, name: str, revision: str) -> bool:
        """Answer for a repository that cannot be had; false where there is one."""
        repository = self.server_hub.repositories.get(name)
        if repository is None:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif revision not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif repository.status != 200:
            code = {401: "RepoNotFound", 403: "GatedRepo"}[repository.status]
            self._send(repository.status, b"{}", {"X-Error-Code": code, "X-Error-Message": "Access is restricted"})
        else:
            return False
        return True

    def _describe(self, name: str, kind: str, revision: str, folder: str):
        if self._refuse(name, revision):
            return
        files = self.server_hub.repositories[name].files
        entries = [
            {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for file, data in files.items()
            if file.startswith(folder)
        ]
        plain = name.removeprefix("datasets/")
        described = {
            "revision": {
                "_id": plain,
                "id": plain,
                "sha": COMMIT,
                "private": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": file} for file in files],
            },
            "tree": entries,
            "paths-info": entries,
        }[kind]
        self._send(200, json.dumps(described).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str, *, with_body: bool):
        if self._refuse(name, revision):
            return
        repository = self.server_hub.repositories[name]
        data = repository.files.get(file)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            self._send(206, data[first : last + 1], headers, with_body=with_body)
        elif with_body and file in repository.broken:
            repository.broken.remove(file)
            self._send(200, data, headers, stops_after=len(data) // 2)
        else:
            self._send(200, data, headers, with_body=with_body)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        *,
        with_body: bool = True,
        stops_after: int | None = None,
    ) -> None:
        self.server_hub.log.append(f"{self.command} {self.path} {status} {self.headers.get('Range', '')}".strip())
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body[:stops_after])
        if stops_after is not None:
            self.close_connection = True
