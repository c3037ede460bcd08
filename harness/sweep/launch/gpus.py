"""The GPUs of this machine that a process may take, found without importing torch."""

import os
import re
import shutil
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them: by number, or by the id of a GPU or of a part of one (MIG).

    Where the variable is set, its GPUs; else those of the machine, of a divided GPU the parts.
    """
    named = os.environ.get(VISIBLE)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        # CUDA sees none of the names from the first on that is no GPU's.
        return names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))]
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
