"""The origin of a result: code, packages, machine, command line."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvsweep.messages.errors import UserError

_PACKAGES = "kvsweep", "torch", "transformers", "tokenizers", "datasets", "math-verify", "numpy", "hydra-core", "triton"


# Other programs get this long before they are ended.
SECONDS = 20.0


@cache
def describe_code() -> dict[str, Any]:
    """Git revision, whether the tree differs from it (None outside a checkout), and versions of the main packages."""
    revision = is_dirty = None
    # In a virtual environment inside another project's checkout, that checkout ignores this file, and its revision says
    # nothing about this code.
    is_ignored = _git("check-ignore", "--quiet", __file__) is not None  # git succeeds if it ignores the file
    if not is_ignored:
        revision = _git("rev-parse", "HEAD")
    if revision is not None:
        is_dirty = bool(_git("status", "--porcelain"))
    return {
        "git_revision": revision,
        "git_dirty": is_dirty,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


@cache
def describe_hardware() -> dict[str, Any]:
    """This machine: its name, system, processor, cores and GPUs."""
    import torch

    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def describe_arithmetic(*, invariant: bool, impl: str, dtype: str) -> dict[str, Any]:
    """Settings of this process, besides cell, packages and hardware, on which a completion's bits depend.

    With `invariant` the bits depend on nothing else, so that decoding passes with equal values can be mixed.
    """
    import torch

    return {
        "invariant": invariant,
        "impl": impl,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def describe_machine() -> dict[str, Any]:
    """This machine and this code, for the last line of a benchmark."""
    return {"code": describe_code(), "hardware": describe_hardware()}


def describe_process() -> dict[str, Any]:
    return {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": sys.argv, **describe_machine()}


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _git(*arguments: str) -> str | None:
    """Return what git prints about this file's folder; None if it fails."""
    return said_by("git", "-C", str(Path(__file__).parent), *arguments)


def said_by(*words: str, **options: Any) -> str | None:
    """Return what another program prints; None if it is missing, fails or hangs. `options` are `subprocess.run`'s."""
    with suppress(OSError, subprocess.SubprocessError):
        return run_program(words, check=True, **options).stdout.strip()
    return None


def run_program(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run another program, which prints nothing here; raises an error if it cannot be run or hangs."""
    # File names that are not UTF-8 are read anyway.
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=SECONDS, **options)


def processor(field: str) -> str:
    """Return what Linux says of the first processor in a field ("model name", "flags"); "" if it says nothing."""
    with suppress(OSError):
        line = re.search(rf"^{field}\s*:[ \t]*(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if line:
            return line[1]
    return ""


def command_line() -> str:
    """Return this process's command line, quoted so that it can be typed again."""
    program = Path(sys.argv[0]).name
    return shlex.join(["kvsweep" if program in ("cli.py", "-c", "") else program, *sys.argv[1:]])


VISIBLE = "CUDA_VISIBLE_DEVICES"


def named_gpus() -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES: numbers, or ids of a GPU or a part (MIG); None if it is unset."""
    variable = os.environ.get(VISIBLE)
    if variable is None:
        return None
    gpus = []
    for name in map(str.strip, variable.split(",")):
        if name in ("", "-1", "NoDevFiles"):  # CUDA ignores everything from the first name that is no GPU
            break
        gpus.append(name)
    return gpus


def visible_gpus() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, else the machine's; a divided GPU counts as its parts.

    Raises UserError if nvidia-smi hangs or cannot be run; if it fails, there are no GPUs.
    """
    named = named_gpus()
    if named is not None:
        return named
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        process = run_program(["nvidia-smi", "-L"])
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"nvidia-smi, which names the GPUs, gives no answer ({error}): set {VISIBLE} to the GPUs of this machine, "
            "or model.device=cpu."
        ) from error
    if process.returncode != 0:
        return []
    # A line is "GPU 0: NVIDIA H100 (UUID: GPU-12ab)", or of a part "  MIG 1g.10gb Device 0: (UUID: MIG-34cd)".
    ids = re.findall(r"\(UUID: ([^)]+)\)", process.stdout)
    gpus = []
    for gpu, following in pairwise([*ids, ""]):  # "" follows the last
        is_divided = not gpu.startswith("MIG") and following.startswith("MIG")  # its parts come just behind it
        if not is_divided:
            gpus.append(gpu)
    return gpus
