"""The GPUs of this machine that a process may take, found without importing torch."""

import os
import re
import shutil
import subprocess
from itertools import pairwise, takewhile

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
    ids = re.findall(r"\(UUID: ([^)]+)\)", listed.stdout) if listed.returncode == 0 else []
    # A divided GPU stands in front of its parts.
    return [one for one, after in pairwise([*ids, ""]) if one.startswith("MIG") or not after.startswith("MIG")]
