"""The command `kvsweep verify`: what is checked, in its order, and what is printed."""

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvsweep import records
from kvsweep.analysis.load import load_texts
from kvsweep.command_line import FAILED, check_engine, counted
from kvsweep.errors import UserError
from kvsweep.files import make_folder, replace_text
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.provenance import describe_code
from kvsweep.harness.verify.stored import Check, StoredRun, check_grades, read_run, stored_checks
from kvsweep.records import VERIFY_FILE
from kvsweep.stored import StoredCell

if TYPE_CHECKING:
    from kvsweep.harness.verify.again import Decoded

_MOST_LINES = 5


def verify(directory: Path, *, count: int, seed: int, every: bool, as_json: bool) -> int:
    """Check a run's folder; print what was found, and return the exit status, 0 or 1."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder: give the folder of a run, such as results/runs/demo.")
    begin, found = time.time(), Found()

    def say(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    check_engine("a verification of completions")
    run = read_run(directory)
    for check in itertools.chain(stored_checks(run), _grades(run)):
        found.checks.append(check)
        say(_of_check(check))
    for why, cells in Counter(run.unread.values()).items():
        say(f"{'cannot':8} cells         {cells} of {counted(len(run.folders), 'cell')}: {why}")
    for one in _decoded(run, None if every else count, seed):
        found.decoded.append(one)
        say(_of_decoded(one))
    for why, texts in Counter(one.cause for one in found.decoded if one.state == "same" and one.cause).items():
        say(f"{'differs':8} {'machine':13} {counted(texts, 'completion')} had the same bits with {why}")
    ok, seconds = found.is_good(run), round(time.time() - begin, 1)
    say(f"{found.summary(run)} ({seconds} s)")
    report = {
        "ok": ok,
        "summary": found.summary(run),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(begin)),
        "seconds": seconds,
        "seed": seed,
        "code": describe_code(),
        "checks": [asdict(check) for check in found.checks],
        "decoded": [asdict(one) for one in found.decoded],
        "unread": run.unread,
    }
    text = json.dumps(report, indent=2)
    if as_json:
        print(text)
    _keep(directory, text)
    return 0 if ok else FAILED


@dataclass
class Found:
    """What was found so far."""

    checks: list[Check] = field(default_factory=list)
    decoded: list["Decoded"] = field(default_factory=list)

    def is_good(self, run: StoredRun) -> bool:
        """Whether nothing fails, and all that kvsweep decoded could be read and drawn completions had the same bits."""
        whole = run.unread.keys() <= run.served and all(one.state == "same" for one in self.decoded)
        is_decoded = bool(self.decoded) or len(run.served) == len(run.folders)
        return whole and is_decoded and not self._failed

    def summary(self, run: StoredRun) -> str:
        same = sum(one.state == "same" for one in self.decoded)
        parts = [f"{same} of {counted(len(self.decoded), 'completion')} decoded again with the same bits"]
        parts = parts if self.decoded else ["no completion was decoded again"]
        return "; ".join([*parts, f"{', '.join(self._failed)}: fails" if self._failed else "no check fails"])

    @property
    def _failed(self) -> list[str]:
        return [check.name for check in self.checks if check.state == "fails"]


def _of_check(check: Check) -> str:
    shown, more = check.lines[:_MOST_LINES], len(check.lines) - _MOST_LINES
    lines = [*shown, *([f"and {more} more"] if more > 0 else [])]
    return "\n".join([f"{check.state:8} {check.name:13} {check.text}", *(f"           {line}" for line in lines)])


def _of_decoded(one: "Decoded") -> str:
    begin = f"{one.state:8} {one.setting}, {one.problem_id} draw {one.draw} ({one.cell_id})"
    if one.state == "cannot":
        return f"{begin}: {one.cause}"
    if one.state == "same":
        return f"{begin}: {one.tokens} tokens"
    where = f"the same tokens, other {', '.join(one.fields)}"
    if one.first_other is not None:
        gap = "" if one.gap is None else f", whose logits differ by {one.gap:+.2g}"
        where = f"first differs at token {one.first_other}: stored {one.stored_token!r}, now {one.token!r}{gap}"
    return f"{begin}: {where}; {one.cause}"


def _keep(directory: Path, text: str) -> None:
    """Leave the result beside the report, which names it; no file of the run is touched."""
    path = directory.resolve() / VERIFY_FILE
    try:
        make_folder(path.parent)
        replace_text(path, f"{text}\n")
    except OSError as error:
        print(f"note: the result is not kept for the report ({error.strerror or error}).", file=sys.stderr)


def _grades(run: StoredRun) -> Iterator[Check]:
    with Grader() as grader:
        yield check_grades(run.folders, grader)


def _decoded(run: StoredRun, count: int | None, seed: int) -> Iterator["Decoded"]:
    """Decode drawn completions again, job by job, each model loaded once; None draws all of them."""
    from kvsweep.harness.verify.again import decoded_again, drawn  # imports torch

    stored = {}
    for folder in run.folders:
        if folder.name in run.found:
            asked = set(run.found[folder.name][0].problem_ids)
            stored[folder.name] = [pair for pair in StoredCell(folder).pairs() if pair[0] in asked]
    total = sum(map(len, stored.values()))
    chosen: dict[str, set[records.Pair]] = {}
    for cell_id, pair in drawn(stored, total if count is None else count, seed):
        chosen.setdefault(cell_id, set()).add(pair)
    jobs: dict[int, list[str]] = {}
    for cell_id in sorted(chosen, key=lambda cell_id: str(run.found[cell_id][0].model)):
        jobs.setdefault(id(run.found[cell_id][0]), []).append(cell_id)
    places = {folder.name: folder for folder in run.folders}
    for ids in jobs.values():
        rows = [
            (run.found[cell_id][1], row)
            for cell_id in ids
            for row in load_texts(places[cell_id], chosen[cell_id]).values()
        ]
        yield from decoded_again(run.found[ids[0]][0], rows, run.passes)
