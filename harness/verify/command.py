"""The command `kvsweep verify`: what is checked, in its order, and what is printed."""

import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsweep.harness.provenance import describe_code
from kvsweep.harness.verify.stored import CheckedCell, Row, read_run, stored_checks
from kvsweep.messages.command_line import FAILED, check_engine, counted
from kvsweep.run_files.row_types import VERIFY_FILE
from kvsweep.run_files.safe_files import make_folder, replace_text

_MOST_LINES = 5


def verify(directory: Path, *, count: int, seed: int, every: bool, as_json: bool) -> int:
    """Check a run's folder; print what was found, and return the exit status, 0 or 1."""
    check_engine("a verification of completions")
    begin = time.time()
    stream = sys.stderr if as_json else sys.stdout
    if every:
        count = sys.maxsize  # more than a run has
    cells = read_run(directory)  # a refusal of the folder needs no torch
    from kvsweep.harness.verify.again import decoded_again

    checks, decoded = list[Row](), list[Row]()
    for row in itertools.chain(stored_checks(list(cells.values())), decoded_again(cells, count, seed)):
        rows = decoded if row.name == "completion" else checks
        rows.append(row)
        print(_text(row), file=stream, flush=True)
    summary, ok = _result(list(cells.values()), checks, decoded)
    seconds = round(time.time() - begin, 1)
    print(f"{summary} ({seconds} s)", file=stream, flush=True)
    report = {
        "ok": ok,
        "summary": summary,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(begin)),
        "seconds": seconds,
        "seed": seed,
        "code": describe_code(),
        "checks": [*map(_as_json, checks)],
        "decoded": [*map(_as_json, decoded)],
        "unread": {name: cell.unread for name, cell in cells.items() if cell.unread},
    }
    text = json.dumps(report, indent=2)
    if as_json:
        print(text)
    _keep(directory, text)
    return 0 if ok else FAILED


def _text(row: Row) -> str:
    """A row as it is printed, with its first lines."""
    indent = " " * 11
    lines = [f"{row.state:8} {row.name:13} {row.text}"]
    lines += [f"{indent}{line}" for line in row.lines[:_MOST_LINES]]
    if len(row.lines) > _MOST_LINES:
        lines.append(f"{indent}and {len(row.lines) - _MOST_LINES} more")
    return "\n".join(lines)


def _as_json(row: Row) -> dict[str, Any]:
    return {"name": row.name, "state": row.state, "text": row.text, "lines": row.lines, **row.facts}


def _result(cells: Sequence[CheckedCell], checks: Sequence[Row], decoded: Sequence[Row]) -> tuple[str, bool]:
    """Say how many completions had the same bits again, and which checks fail; and whether all is good.

    It is if nothing fails, all that kvsweep decoded could be read, and drawn completions had the same bits.
    """
    again = "no completion was decoded again"
    same = [row.state for row in decoded].count("same")
    if decoded:
        again = f"{same} of {counted(len(decoded), 'completion')} decoded again with the same bits"
    failed = [row.name for row in checks if row.state == "fails"]
    unread = [cell.unread for cell in cells if not cell.served]  # a server's texts cannot be decoded again
    is_decoded = len(decoded) > 0 or not unread
    ok = not failed and not any(unread) and is_decoded and same == len(decoded)
    return f"{again}; {', '.join(failed) or 'no check'} fails", ok


def _keep(directory: Path, text: str) -> None:
    """Leave the result beside the report, which names it; no file of the run is touched."""
    path = directory.resolve() / VERIFY_FILE
    try:
        make_folder(path.parent)
        replace_text(path, f"{text}\n")
    except OSError as error:
        print(f"note: the result is not kept for the report ({error.strerror or error}).", file=sys.stderr)
