"""`kvsweep init DIR`: a folder of one's own, with a policy, problems and a sweep to change."""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvsweep.base.errors import UserError
from kvsweep.harness.toy.tasks import problems

TEMPLATE = Path(__file__).resolve().parents[1] / "template"
_PROBLEMS = 40


def init(arguments: Sequence[str]) -> None:
    """Copy the template into a new folder, and write its problems."""
    about = "A folder of your own: a policy, problems and a sweep to change, and conf/ for more of them."
    parser = argparse.ArgumentParser(prog="kvsweep init", description=about)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    folder: Path = parser.parse_args(arguments).folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a new folder, or an empty one.")
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        rows = ({"id": p.id, "problem": p.question, "answer": p.answer} for p in problems("chain", _PROBLEMS))
        (folder / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}): name another folder.") from error
    print(f"made {folder}; next:\n  cd {folder}\n  kvsweep -m experiment=mine\n  kvsweep-report results/runs/mine")
