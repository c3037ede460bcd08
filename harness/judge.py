"""`kvsweep judge`: is one engine or setting worse than another, by the outputs of both?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvsweep.analysis import notation
from kvsweep.analysis.judge import Outputs, in_words, lacking, notes, verdicts, without_copies
from kvsweep.analysis.outputs import Answer, Asked, read_outputs, read_texts
from kvsweep.analysis.report.judged import judged_page, shown_pairs
from kvsweep.command_line import FAILED, UNCLEAR, counted
from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.files import replace_text
from kvsweep.harness.grading.answers import AnswerKind, Job, canonical_gold
from kvsweep.harness.grading.grader import Grader

_NAMED = 5  # answers that a note names
_BATCH = 2000  # texts in memory while they are graded
Text = tuple[Answer, str | None]


def judge(
    files: Sequence[Path],
    *,
    names: Sequence[str],
    full: str | None,
    margin: float,
    sizes: Mapping[str, float],
    correct: str | None,
    where: Mapping[str, str],
    columns: Mapping[str, str],
    grades: str,
    gold: Path | None,
    kind: AnswerKind,
    markdown: Path | None,
    html: Path | None,
) -> int:
    """Print a verdict on each file of outputs beside the baseline's; the exit status of the worst verdict."""
    if gold is not None and grades != "ours":
        raise UserError(f"--gold {gold} is read by --grades ours alone: give both.")
    written = [path.resolve() for path in (markdown, html) if path is not None]
    if len({*written} - {path.resolve() for path in (*files, gold or files[0])}) < len(written):
        raise UserError("--markdown and --html each write a file: name one that is none of the others.")
    paths = _named(files, names)
    baseline = next(iter(paths)) if full is None else full
    if unknown := sorted({baseline, *sizes} - set(paths)):
        raise UserError(f"{unknown[0]} names none of the files: choose from {', '.join(paths)}.")
    asked = Asked(correct=correct, where=where, columns=columns, graded=grades == "theirs")
    outputs: Outputs = {name: read_outputs(path, asked) for name, path in paths.items()}
    told = list[str]()
    texts = partial(read_texts, asked=asked)
    if grades == "ours":
        golds = {} if gold is None else _golds(gold)
        with Grader() as grader:
            ours = {name: list(_graded(grader, texts(path), path, golds, kind)) for name, path in paths.items()}
        told, outputs = [note for name in paths for note in _disagreements(name, outputs[name], ours[name])], ours
    single = {name: without_copies(answers) for name, answers in outputs.items()}
    same = "has the same text in all draws of a problem, as greedy decoding writes it: one draw counts."
    told += [f"{name} {same}" for name in outputs if len(single[name]) < len(outputs[name])]
    outputs = single
    pairs = {name: lacking(answers, outputs[baseline]) for name, answers in outputs.items() if name != baseline}
    gaps = {name: pair for name, pair in pairs.items() if pair}
    told = [*notes(outputs, baseline, margin / 100, gaps), *told]
    for note in told:
        print(f"note: {note}")
    table = verdicts(outputs, baseline, margin=margin / 100, sizes=sizes, gaps=gaps)
    words = in_words(table, baseline, margin)
    print(table.to_string(index=False), words, sep="\n\n")
    if markdown is not None:
        lines = [[str(name) for name in table.columns], *table.astype(str).to_numpy().tolist()]
        replace_text(markdown, f"{notation.markdown(lines)}\n\n{words}\n")
    if html is not None:
        wanted = shown_pairs(outputs, baseline)
        beside = {name: {a.key: t for a, t in texts(path) if t and a.key in wanted} for name, path in paths.items()}
        replace_text(html, judged_page(table, words, told, outputs, baseline, beside))
        print(html)
    labels = set(table["label"])
    return FAILED if "worse" in labels else UNCLEAR if labels & {"unclear", notation.MAY_BE_SAFE} else 0


def _named(files: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    # Programs name the outputs of each run alike, in a folder for each.
    stems, folders = [path.stem for path in files], [path.absolute().parent.name for path in files]
    by_folder = len(set(stems)) < len(stems) == len(set(folders))
    titles = list(names) or (folders if by_folder else stems)
    if len(files) < 2 or len(titles) != len(files):
        raise UserError(f"{counted(len(files), 'file')} and {counted(len(titles), 'name')}: give two files or more.")
    if len(set(titles)) < len(titles):
        raise UserError(f"two files are named {visible(max(titles, key=titles.count))}: give each a --name.")
    return dict(zip(titles, files, strict=True))


def _golds(path: Path) -> dict[str, Any]:
    """The right answers by problem, from rows of id and gold."""
    found: dict[str, Any] = {}
    for one in (answer for answer, _ in read_texts(path, Asked(graded=False))):
        if one.gold is None or found.setdefault(one.problem, one.gold) != one.gold:
            wrong = f"{path} has no gold for problem {visible(one.problem)!r:.60}, or two"
            raise UserError(f"{wrong}: give rows of id and gold.")
    return found


def _graded(
    grader: Grader, answers: Iterator[Text], path: Path, golds: Mapping[str, Any], kind: AnswerKind
) -> Iterator[Answer]:
    """The answers with the grades that `kvsweep grade` would give; one that cannot be graded raises a UserError."""
    while batch := list(islice(answers, _BATCH)):
        jobs = [_job(one, text, path, golds, kind) for one, text in batch]
        for (one, _), verdict in zip(batch, grader.judge(jobs), strict=True):
            yield replace(one, correct=float(verdict.outcome == "correct"), grade=None)


def _job(one: Answer, text: str | None, path: Path, golds: Mapping[str, Any], kind: AnswerKind) -> Job:
    gold = _gold_of(golds.get(one.problem, one.gold), kind)
    if text is None or gold is None:
        lacks = "no text" if text is None else f"no gold of the kind {kind}"
        place = f"{path}: problem {visible(one.problem)!r:.60}, draw {one.draw} has {lacks}"
        raise UserError(f"{place}: --grades ours needs text and gold (--gold FILE, --kind, --column text=NAME).")
    # Served texts have their thinking in front, between tags, or not at all.
    thinks = "<think>" in text or "</think>" in text
    rule = {"answer_from": "after_think" if thinks else "whole_text"}
    return Job(text=text, stop_reason="length" if one.truncated else "stop", gold=gold, kind=kind, rule=rule)


def _gold_of(gold: Any, kind: AnswerKind) -> str | None:
    """The gold of an `Answer` as the grader takes it; a list of one counts as that one."""
    if isinstance(gold, list) and len(gold) == 1:
        [gold] = gold
    return canonical_gold(str(gold), kind) if isinstance(gold, str | int) and not isinstance(gold, bool) else None


def _disagreements(name: str, theirs: Sequence[Answer], ours: Sequence[Answer]) -> Iterator[str]:
    known = {one.key: one.correct for one in theirs if one.correct is not None}
    differ = [one for one in ours if known.get(one.key, one.correct) != one.correct]
    if known:
        words = [f"{one.problem} draw {one.draw} (ours {'right' if one.correct else 'wrong'})" for one in differ]
        shown = "; ".join(map(visible, words[:_NAMED])) + "; ..." * (len(words) > _NAMED)
        yield f"{name}: {len(differ)} of {len(known):,} grades differ from the file's own{': ' * bool(words)}{shown}."
