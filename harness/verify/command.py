"""The command `kvsweep verify`: what is checked, in its order, and what is printed."""

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    cells = read_run(directory)
    checked = list(cells.values())
    rows = list[Row]()
    for row in itertools.chain(stored_checks(checked), _unread(cells), _again(cells, count, seed)):
        rows.append(row)
        print(_text(row), file=stream, flush=True)
    decoded = [row for row in rows if row.name == "completion"]
    summary = _summary(rows, decoded)
    ok = _is_good(checked, rows, decoded)
    seconds = round(time.time() - begin, 1)
    print(f"{summary} ({seconds} s)", file=stream, flush=True)
    report = {
        "ok": ok,
        "summary": summary,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(begin)),
        "seconds": seconds,
        "seed": seed,
        "code": describe_code(),
        "checks": [_as_json(row) for row in rows if row.name != "completion"],
        "decoded": [_as_json(row) for row in decoded],
        "unread": {name: cell.unread for name, cell in cells.items() if cell.unread},
    }
    text = json.dumps(report, indent=2)
    if as_json:
        print(text)
    _keep(directory, text)
    return 0 if ok else FAILED


def _unread(cells: Mapping[str, CheckedCell]) -> Iterator[Row]:
    """Yield why there is nothing to compare some cells with."""
    for why, number in Counter(cell.unread for cell in cells.values() if cell.unread).items():
        yield Row(name="cells", state="cannot", text=f"{number} of {counted(len(cells), 'cell')}: {why}")


def _again(cells: Mapping[str, CheckedCell], count: int, seed: int) -> Iterator[Row]:
    """Yield the completions that are decoded again, and then what differs without having changed any bit."""
    from kvsweep.harness.verify.again import decoded_again  # imports torch

    causes = Counter[str]()
    for row in decoded_again(cells, count, seed):
        yield row
        if row.state == "same" and row.facts["cause"]:
            causes[row.facts["cause"]] += 1
    for cause, number in causes.items():
        text = f"{counted(number, 'completion')} had the same bits with {cause}"
        yield Row(name="machine", state="differs", text=text)


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


def _is_good(cells: Sequence[CheckedCell], rows: Sequence[Row], decoded: Sequence[Row]) -> bool:
    """Whether nothing fails, and all that kvsweep decoded could be read and drawn completions had the same bits."""
    if any(row.state == "fails" for row in rows):
        return False
    cells_of_kvsweep = [cell for cell in cells if not cell.served]  # a server's texts cannot be decoded again
    if any(cell.unread for cell in cells_of_kvsweep):
        return False
    if cells_of_kvsweep and not decoded:
        return False
    return all(row.state == "same" for row in decoded)


def _summary(rows: Sequence[Row], decoded: Sequence[Row]) -> str:
    """How many completions had the same bits again, and which checks fail, in words."""
    again = "no completion was decoded again"
    if decoded:
        same = sum(row.state == "same" for row in decoded)
        again = f"{same} of {counted(len(decoded), 'completion')} decoded again with the same bits"
    failed = ", ".join(row.name for row in rows if row.state == "fails") or "no check"
    return f"{again}; {failed} fails"


def _keep(directory: Path, text: str) -> None:
    """Leave the result beside the report, which names it; no file of the run is touched."""
    path = directory.resolve() / VERIFY_FILE
    try:
        make_folder(path.parent)
        replace_text(path, f"{text}\n")
    except OSError as error:
        print(f"note: the result is not kept for the report ({error.strerror or error}).", file=sys.stderr)
