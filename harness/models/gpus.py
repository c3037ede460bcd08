"""The GPUs of this machine that a process may take, found without importing torch."""

import os
import re
import shutil
import subprocess
from itertools import takewhile

VISIBLE = "CUDA_VISIBLE_DEVICES"


def named_gpus() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by number or by the id of a GPU or part (MIG); None if it is unset."""
    if (named := os.environ.get(VISIBLE)) is None:
        return None
    # CUDA sees none of the names from the first on that is no GPU's.
    return list(takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), map(str.strip, named.split(","))))


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names; without it those of the machine, of a divided GPU the parts."""
    if (named := named_gpus()) is not None:
        return named
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    gpus: list[list[str]] = []
    for line in listed.stdout.splitlines() if listed.returncode == 0 else []:
        if found := re.search(r"\(UUID: ([^)]+)\)", line):
            if found[1].startswith("MIG") and gpus:
                gpus[-1].append(found[1])
            else:
                gpus.append([found[1]])
    return [name for gpu in gpus for name in gpu[1:] or gpu]
