"""The only functions that open, replace and identify files.

A run directory may come from a stranger, so each file must be what it should be: a regular file, not a link, no larger
than its kind can be. A file that a cell's outputs depend on is identified by a hash of its contents.
"""

import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from filelock import FileLock

from kvsweep.messages.errors import UnusableFileError

# The largest file that is read at once, and the longest line of a file that is read line by line.
MOST_BYTES = 64 << 20
# In which a GGUF file has its fields and the names of its tensors; the vocabulary takes most of it.
_HEAD_BYTES = 64 << 20
_FLAGS = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT, "rb+": os.O_RDWR}
# A change within one tick of a file system's clock leaves no trace in the file's times.
_TICK_NS = 2_000_000_000
Stamp = list[int]
# Digests, and the stamps of their files, by the files' paths.
Noted = dict[str, tuple[list[Stamp], list[str]]]
_MEMORY: Noted = {}


def open_file(path: Path, mode: Literal["rb", "ab", "rb+"] = "rb", *, linked: bool = False) -> BinaryIO:
    """Open a regular file at once; `linked` allows a link, for files that only the user names.

    Raises:
        OSError: no such file, no permission.
        UnusableFileError: a link, a pipe, a device, a folder; to write, also a file with a second name.
    """
    flags = _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC | (0 if linked else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise UnusableFileError(f"{path} is a link, a pipe or a device: put a plain file there.") from error
        raise
    status = os.fstat(descriptor)
    has_second_name = mode != "rb" and status.st_nlink > 1
    if not stat.S_ISREG(status.st_mode) or has_second_name:
        os.close(descriptor)
        raise UnusableFileError(f"{path} is no plain file, or has a second name: put a plain file there.")
    return os.fdopen(descriptor, mode)


def read_file(path: Path, most: int = MOST_BYTES, *, linked: bool = False) -> bytes:
    """Return a file's contents; raises as `open_file`, and for more than `most` bytes."""
    with open_file(path, linked=linked) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise UnusableFileError(f"{path} has more than {most:,} bytes, and no file of its kind has: delete it.")
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; raises as `open_file`, and at a line of more than MOST_BYTES."""
    with open_file(path) as file:
        while line := file.readline(MOST_BYTES + 1):
            if len(line) > MOST_BYTES:
                raise UnusableFileError(f"{path} has a line of more than {MOST_BYTES:,} bytes: delete that line.")
            yield line


def make_folder(path: Path) -> Path:
    """Make a folder of a run directory, with its parents; refuses a link in its place."""
    if path.is_symlink():
        raise UnusableFileError(f"{path} is a link, through which nothing is written: put a folder there.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def locked(path: Path) -> FileLock:
    """Return the lock for a file that one process replaces while another adds to it; use it in `with`."""
    return FileLock(path.with_name(f".{path.name}.lock"))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path to write to; it replaces `path` if the block ends without an error.

    Readers see either the old or the new file, complete, even after a crash of the machine.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        with open_file(temporary) as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by the text in UTF-8, with `?` for half a character; an equal file is left untouched."""
    data = text.encode(errors="replace")
    with suppress(OSError), open_file(path) as file:
        if file.read(len(data) + 1) == data:
            return
    with replacing(path) as temporary:
        temporary.write_bytes(data)


# --- Contents -----------------------------------------------------------------------------------------------


def digests(files: Sequence[Path], *, named: bool = False) -> list[str]:
    """Return, per file, 16 digits of the SHA-256 of all contents up to its end, over the files in order.

    `named` adds each file's name and size before its contents. While all sizes, times and inodes stay the same, later
    calls answer from memory, for large files also from the user's cache folder. Raises OSError for a missing file,
    UnusableFileError also for a pipe, a device, or a file that is being written.
    """
    key = json.dumps([named, *map(os.path.realpath, files)])
    stamps = [*map(stamp, files)]
    is_large = sum(size for size, *_ in stamps) >= MOST_BYTES
    if key not in _MEMORY and is_large:
        _MEMORY.update(_stored())
    noted_stamps, digests = _MEMORY.get(key, ([], []))
    if noted_stamps == stamps:
        return digests
    sha256 = hashlib.sha256()  # goes on from file to file
    digests = []
    for path in files:
        with open_file(path, linked=True) as file:
            if named:
                sha256.update(f"{path.name}:{os.fstat(file.fileno()).st_size}".encode())
            while block := file.read(1 << 20):
                sha256.update(block)
        digests.append(sha256.hexdigest()[:16])
    if stamps != [*map(stamp, files)]:
        raise UnusableFileError(f"{files[0].parent} is being written to: run the command again when it is whole.")
    # A stamp has a size, two times, and an inode.
    is_at_rest = all(time.time_ns() - max(times) > _TICK_NS for _, *times, _ in stamps)
    if is_at_rest:
        _MEMORY[key] = stamps, digests
        if is_large:
            with suppress(OSError):
                _store().parent.mkdir(parents=True, exist_ok=True)
                replace_text(_store(), json.dumps({**_stored(), key: _MEMORY[key]}))
    return digests


def stamp(path: Path) -> Stamp:
    """Return size, times and inode of a file. They change when it is written, even if its dates are set back."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def at_home(place: str) -> str:
    """Return a user's path with the home folder in place of a leading `~`."""
    if place != "~" and not place.startswith("~/"):
        return place
    return f"{Path.home()}{place[1:]}"


def cache_folder() -> Path:
    """Return the user's folder for files that can be made again; OSError without one, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsweep"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder; set XDG_CACHE_HOME") from error


def _store() -> Path:
    return cache_folder() / "digests.json"


def _stored() -> Noted:
    with suppress(OSError, ValueError, RecursionError):
        return dict(json.loads(read_file(_store())))
    return {}


def contains(file: Path, text: str) -> bool:
    """True if the first 64 MiB of a file contain a text; a file that has not changed is read once."""
    state = file.stat()
    return _contains(file, text, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)  # every cell asks for the model's identity, which asks this
def _contains(file: Path, text: str, *_: int) -> bool:
    with file.open("rb") as opened:
        return text.encode() in opened.read(_HEAD_BYTES)
