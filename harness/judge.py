"""`kvsweep judge`: is one engine or setting worse than another, by the outputs of both?"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.answers import GREEDY_BELOW, counted_shares
from kvsweep.analysis.outputs import PAIR, Outputs, Reading, read_outputs
from kvsweep.analysis.questions import differing, one_per_problem, refuse_many_ids
from kvsweep.analysis.report.judged import judged_page
from kvsweep.analysis.statistics import noninferiority
from kvsweep.analysis.statistics.metrics import pareto_front
from kvsweep.analysis.statistics.noninferiority import Decision, Floats, Groups, PairedTest
from kvsweep.harness.benchmarks.golds import SOLUTION_END, read_gold
from kvsweep.harness.grading.answers import AnswerKind, Ungraded
from kvsweep.harness.grading.grader import Grader
from kvsweep.messages.command_line import FAILED, UNCLEAR, counted
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible
from kvsweep.run_files.safe_files import at_home, replace_text
from kvsweep.run_files.thinking import Thinking, ThinkTags, thinking_of, without_end

_NAMED = 4  # problems or answers that a note names
_ENDS = ("stop", "length")
_NAME = re.compile(r"^(?:([^=/]+)=)?(.*)$", re.DOTALL)
# The labels of a file that is safe by itself: one of several, and one that surely wins.
_MAY_BE_SAFE, _BETTER = "may be safe", "better"
_LEGEND = {
    _BETTER: "Better: surely wins.",
    "unclear": "Unclear: more answers are needed.",
    _MAY_BE_SAFE: "May be safe: by itself, but of so many settings one may be so by luck; add draws or files.",
    "small loss": "Small loss: surely loses, and less than the margin.",
    "worse": "Worse: surely loses; how much is open.",
}
Answers = Mapping[str, pd.DataFrame]  # of each setting, as `Outputs.answers` has them


class Verdict(NamedTuple):
    """One setting beside the baseline."""

    label: str
    decision: Decision
    test: PairedTest
    accuracy: float  # the baseline's, on the same pairs
    elsewhere: tuple[float, float]  # the interval for problems like these
    shows_nothing: bool  # so few pairs leave even equal answers open
    to_decide: str  # how much would show that an unclear setting is safe, if it equals the baseline: "48 draws"
    texts: tuple[int, int]  # how many differ, and how many there are
    unused: int  # pairs, of draws that few problems have
    beyond_control: bool


def judge(
    files: Sequence[str],
    *,
    full: str | None,
    control: str | None,
    margin: float,
    sizes: Mapping[str, float],
    reading: Reading,
    gold: Path | None,
    kind: AnswerKind,
    markdown: Path | None,
    html: Path | None,
) -> int:
    """Print a verdict on each setting beside the baseline; return the exit status of the worst verdict.

    `files` are FILE or NAME=FILE, a folder in a file's place; files of one name are one setting.
    """
    if gold is not None and reading.graded:
        raise UserError(f"--gold {gold} is read by --grades ours alone: give both.")
    paths = _settings(files)
    _refuse_targets([*paths.values(), [gold] if gold else []], [path for path in (markdown, html) if path])
    baseline = next(iter(paths)) if full is None else full
    if control == baseline:
        raise UserError(f"--control {control} is the baseline: name the file of the baseline asked again.")
    for name in (baseline, control or baseline, *sizes):
        if name not in paths:
            raise UserError(f"{visible(name)} names none of the files: choose from {', '.join(paths)}.")
    outputs = {name: read_outputs(source, reading) for name, source in paths.items()}
    _refuse_unlike(outputs, baseline, reading)
    answers = {name: one.answers for name, one in outputs.items()}
    if not reading.graded:
        answers = _regraded(answers, gold, kind)
    verdicts = judged(answers, baseline, control, margin=margin / 100, sizes=sizes)
    sentences = {name: _sentence(name, verdict, control) for name, verdict in verdicts.items()}
    table = _table(verdicts, sizes)
    notes = [*_notes_on_files(paths, outputs, baseline, reading), *_notes(answers, baseline)]
    if answers[baseline]["correct"].mean() <= margin / 100:
        notes.insert(0, f"{baseline} is right in at most {notation.number(margin)}%: nothing is safe beside it.")
    for name, verdict in verdicts.items():
        notes += _notes_on_pairs(name, verdict, baseline)
    words = _in_words(verdicts, baseline, margin)
    shown = [*sentences.values(), "", table.to_string(index=False), "", *(f"note: {note}" for note in notes), "", words]
    print(*shown, sep="\n")
    if markdown is not None:
        rows = notation.markdown([[*table.columns], *table.to_numpy().tolist()])
        lines = [notation.markdown_text(line) for line in (*sentences.values(), *notes, *words.splitlines())]
        places = len(sentences)
        replace_text(markdown, "\n\n".join([*lines[:places], rows, *lines[places:], ""]))
    if html is not None:
        replace_text(html, judged_page(table, sentences, words, notes, answers, baseline))
        print(html)
    labels = {verdict.label for name, verdict in verdicts.items() if name != control or len(verdicts) == 1}
    if "worse" in labels:
        return FAILED
    return UNCLEAR if labels & {"unclear", _MAY_BE_SAFE} else 0


# --- files ---------------------------------------------------------------------------------------------------


def _settings(words: Sequence[str]) -> dict[str, list[Path]]:
    """The files of each setting, by its name: the one before an equals sign, or else the file's."""
    names, files = list[str](), list[Path]()
    for word in words:
        name, path = ("", word) if Path(word).exists() else _NAME.findall(word)[0]
        names.append(name)
        files.append(Path(at_home(path)))
    # Programs name the outputs of each run alike, in a folder for each.
    titles = [path.name if path.is_dir() else path.stem for path in files]
    folders = [path.absolute().parent.name for path in files]
    if len({*titles}) < len(titles) == len({*folders}):
        titles = folders
    settings = dict[str, list[Path]]()
    for name, title, path in zip(names, titles, files, strict=True):
        settings.setdefault(name or title, []).append(path)
    alike = any(len(settings[title]) > 1 for name, title in zip(names, titles, strict=True) if not name)
    if len(settings) < 2 or alike:
        given = f"{counted(len(files), 'file')} and the names {visible(', '.join(settings))}"
        raise UserError(f"{given}: give two files or more, and name each NAME=FILE; files of one name are one setting.")
    return settings


def _refuse_targets(sources: Sequence[Sequence[Path]], targets: Sequence[Path]) -> None:
    read = {path.resolve() for paths in sources for path in paths}
    written = {path.resolve() for path in targets}
    if len(written - read) < len(targets):
        raise UserError("--markdown and --html each write a file: name one that is none of the others.")


def _refuse_unlike(outputs: Mapping[str, Outputs], baseline: str, reading: Reading) -> None:
    """Raise UserError for files of other questions or grades, and for an option that names no column of any."""
    columns = {column for one in outputs.values() for column in one.columns}
    for name in reading.ignored:
        if name not in columns:
            has = visible(", ".join(sorted(map(str, columns))))
            raise UserError(f"--ignore {visible(name)} names no column: choose from {has:.300}.")
    questions = {name: one_per_problem(one.questions, one.answers) for name, one in outputs.items()}
    for name, one in outputs.items():
        refuse_many_ids(questions[name], name)
        scores = (outputs[baseline].score, one.score)
        if None not in scores and scores[0] != scores[1]:
            mend = "give outputs of the same grades, or choose by --correct NAME, --where filter=NAME"
            raise UserError(f"{baseline} and {name} have the grades {scores[0]!r:.60} and {scores[1]!r:.60}: {mend}.")
        several = all(side.answers["draw"].nunique() > 1 for side in (outputs[baseline], one))
        differences = [*differing(questions[baseline], questions[name], several=several)]
        if differences:
            column, problem = differences[0]
            names = ", ".join(visible(name) for name, _ in differences)
            other = f"{baseline} and {name} differ in {names:.200} for problem {visible(problem)!r:.60}"
            mend = f"--ignore {visible(column)} if that is no part of the question"
            raise UserError(f"{other}: give outputs of the same questions, or {mend} (repeatable).")


# --- grades --------------------------------------------------------------------------------------------------


def _regraded(answers: Answers, gold: Path | None, kind: AnswerKind) -> dict[str, pd.DataFrame]:
    """The answers with the grades that `kvsweep grade` would give, and the file's own as `theirs`."""
    golds = None if gold is None else _golds(gold)
    thinking, tags = _thinking_of_files(answers)
    regraded = {}
    with Grader() as grader:
        for name, table in answers.items():
            if table["text"].isna().all():
                raise UserError(f"{name} has no text: give --column text=NAME, or leave out --grades ours.")
            if golds is not None:
                table = table.assign(gold=table["problem_id"].map(golds))
            seen = zip(table.itertuples(), thinking[name], strict=True)
            jobs = [_job(row, own, kind, tags[name]) for row, own in seen]
            outcomes = iter(verdict.outcome for verdict in grader.judge([job for job in jobs if job]))
            ours = pd.Series([next(outcomes) if job else None for job in jobs], index=table.index, dtype=object)
            cut = np.array([job is not None and job.stop_reason == "length" for job in jobs])
            unknown = ours.eq("grader_timeout")
            regraded[name] = table.assign(
                theirs=table["correct"],
                correct=ours.eq("correct").astype(float).where(ours.notna() & ~unknown),
                sign=table["sign"].mask(unknown, "the grader's time-out"),
                ending=table["ending"].mask(cut, "length"),
            )
    return regraded


def _golds(path: Path) -> "pd.Series[str]":
    """The golds of a file, by problem."""
    rows = read_outputs(path, Reading(graded=False))
    return one_per_problem(rows.questions[["gold"]], rows.answers)["gold"]


def _thinking_of_files(answers: Answers) -> tuple[dict[str, list[Thinking | None]], dict[str, ThinkTags | None]]:
    """What each text shows of its thinking, and the tags of each file whose prompts open it.

    Tags of any name are those of thinking if half of the texts of some file close them. Prompts open the thinking if
    half of the texts of some file close one that they do not open. Where a file has few of such texts, or none beside a
    file that has them, an answer and a text that was cut off look alike, unless the file names the endings.
    """
    seen = {name: [*map(_thinking, table["text"])] for name, table in answers.items()}
    usual = set[ThinkTags]()
    for thinking in seen.values():
        counts = Counter(one.tags for one in thinking if one and one.closes)
        usual |= {tags for tags, count in counts.items() if 2 * count >= len(thinking)}
    closing, opened = dict[str, list[ThinkTags]](), list[ThinkTags]()
    for name, thinking in seen.items():
        seen[name] = [one if one and (one.named or one.tags in usual) else None for one in thinking]
        closing[name] = [one.tags for one in seen[name] if one and one.closes and not one.opens]
        if 2 * len(closing[name]) >= len(thinking):
            opened.append(closing[name][0])
    tags = {name: own[0] if own and opened else None for name, own in closing.items()}
    for name, table in answers.items():
        known = [*closing[name], *opened]
        silent = table["text"].notna() & ~table["ending"].isin(_ENDS) & np.array([one is None for one in seen[name]])
        if tags[name] is None and known and silent.any():
            share = f"{len(closing[name]):,} of {len(table):,} texts close their thinking with {known[0].end}"
            why = "an answer and a text that was cut off in its thinking look alike"
            mend = "--column stop_reason=NAME names the column that tells them apart"
            raise UserError(f"{visible(name)}: {share}, so that {why}: {mend}, or drop all thinking from the texts.")
    return seen, tags


def _thinking(text: str | None) -> Thinking | None:
    return None if text is None else thinking_of(text) or thinking_of(without_end(text), named=False)


def _job(row: Any, own: Thinking | None, kind: AnswerKind, of_file: ThinkTags | None) -> Ungraded | None:
    """What to grade; None where no answer is known. Of a text that was cut off a server may send nothing."""
    if row.sign is not None or (row.text is None and row.ending != "length"):
        return None
    place = f"{row.place}: problem {visible(row.problem_id)!r:.60}, draw {row.draw} has"
    if row.gold is None or row.gold != row.gold:
        raise UserError(f"{place} no gold: give it, or those of all problems by --gold FILE.")
    gold = row.gold
    if isinstance(gold, str):
        gold = gold.rpartition(SOLUTION_END)[2]  # GSM8K's target is a worked solution
    try:
        right = read_gold(gold, kind)
    except ValueError as error:
        shown = visible(str(row.gold))
        raise UserError(f"{place} the gold {shown!r:.60}, which {error}: correct it or --kind.") from None
    text = row.text or ""
    tags = own.tags if own and (own.opens or of_file is None) else of_file
    rule = {"tags": asdict(tags)} if tags else {"answer_from": "whole_text"}
    ended = row.ending != "length" and (tags is None or tags.closing(text) is not None)
    return Ungraded(text=text, stop_reason="stop" if ended else "length", gold=right, kind=kind, rule=rule)


# --- verdicts ------------------------------------------------------------------------------------------------


def _score_arrays(answers: Answers, baseline: str) -> tuple[dict[str, Floats], Groups]:
    """Each file's grades of the baseline's problems, [problems, draws], and each problem's group."""
    tables = {name: table.pivot(index=PAIR[0], columns=PAIR[1], values="correct") for name, table in answers.items()}
    problems = tables[baseline].index
    draws = sorted({draw for table in tables.values() for draw in table.columns.tolist()})
    scores = {name: table.reindex(index=problems, columns=draws).to_numpy(float) for name, table in tables.items()}
    if "group" not in answers[baseline]:
        return scores, None
    groups: Any = answers[baseline].groupby("problem_id")["group"]
    if groups.nunique().max() > 1:
        raise UserError(
            f"problem {groups.nunique().idxmax()!r:.60} has several values of --group: name another column."
        )
    return scores, pd.factorize(groups.first()[problems])[0]


def judged(
    answers: Answers, baseline: str, control: str | None, *, margin: float, sizes: Mapping[str, float] | None = None
) -> dict[str, Verdict]:
    """The verdict on each setting beside the baseline.

    The correction for the number of settings, and the search for one to take, are those of a sweep (docs/report.md),
    without the control. `sizes` are the bytes, by setting.
    """
    counts = counted_shares(answers)
    scores, groups = _score_arrays(answers, baseline)
    full = scores.pop(baseline)
    tests = dict[str, PairedTest]()
    for name, cell in scores.items():
        share = min(counts[name], counts[baseline])
        test = noninferiority.paired_test(cell, full, "these", share, groups)
        if not test.pairs.size:
            _refuse_no_pair(answers, baseline, name)
        # As in a report, greedy answers, which one draw may be, have no new draws.
        if share * test.pairs.shape[1] < GREEDY_BELOW or groups is not None:
            test = replace(test, population="like_these")
        tests[name] = test
    losable = noninferiority.can_lose(full, margin)
    tried = {name: test for name, test in tests.items() if name != control}
    decisions = noninferiority.decide_tests(tried, losable, margin=margin)
    beyond = set[str]()
    if control:
        decisions |= noninferiority.decide_tests({control: tests[control]}, losable, margin=margin)
        cells = {name: scores[name] for name in tried}
        beyond = noninferiority.beyond_test(tests, cells, full, scores[control])
    # A sequence from the largest cache down needs all sizes; without them Holm's procedure decides alone.
    chains = [sorted(tried, key=lambda name: -sizes[name])] if sizes and tried.keys() <= sizes.keys() else []
    taken = noninferiority.hold_in_search({name: decisions[name].p_holds for name in tried}, chains) | {control}
    verdicts = dict[str, Verdict]()
    for name, test in tests.items():
        decision, cell = decisions[name], scores[name]
        unclear = losable and decision.label == "unclear"
        graded = np.where(np.isfinite(cell), full, np.nan)
        like_these = replace(test, population="like_these")
        equal = replace(test, pairs=np.zeros_like(test.pairs))
        verdicts[name] = Verdict(
            label=_label(decision, is_taken=name in taken),
            decision=decision,
            test=test,
            accuracy=noninferiority.paired_test(graded, np.zeros_like(full), groups=groups).difference,
            elsewhere=(like_these.bound(noninferiority.LEVEL, side=-1), like_these.bound(noninferiority.LEVEL, side=1)),
            shows_nothing=unclear and equal.bound(noninferiority.LEVEL, side=-1) <= -margin,
            to_decide=_to_decide(cell, full, margin, test) if unclear else "",
            texts=_texts_that_differ(answers[baseline], answers[name]),
            unused=int(np.isfinite(cell - full).sum() - np.isfinite(test.pairs).sum()),
            beyond_control=name in beyond,
        )
    return verdicts


def _label(decision: Decision, *, is_taken: bool) -> str:
    if decision.label in ("safe", "small loss") and not is_taken:
        return _MAY_BE_SAFE
    return _BETTER if decision.label == "safe" and decision.low > 0 else decision.label


def _to_decide(cell: Floats, full: Floats, margin: float, test: PairedTest) -> str:
    if test.population == "these":
        return f"{noninferiority.draws_to_hold(cell, full, margin=margin):,} draws"
    units = "problems" if test.groups is None else "groups"
    return f"{noninferiority.problems_to_hold(cell, full, margin=margin, groups=test.groups):,} {units}"


def _refuse_no_pair(answers: Answers, baseline: str, name: str) -> None:
    for one in (baseline, name):
        if answers[one]["correct"].isna().all():
            mend = "write 1 or 0, give --grades ours, or --ignore a column that says no failure"
            raise UserError(f"{visible(one)} has no grade in any row: {mend}.")
    raise UserError(f"{baseline} and {name} share no graded pair of problem and draw: check ids and draws.")


# --- words ---------------------------------------------------------------------------------------------------


def _sentence(name: str, verdict: Verdict, control: str | None) -> str:
    """A verdict that can be pasted: label, both accuracies, difference, what it rests on, what would decide."""
    decision, test = verdict.decision, verdict.test
    before = notation.percent(verdict.accuracy)
    after = notation.percent(verdict.accuracy + decision.difference)
    points, interval = _points(decision)
    size = f"{counted(test.pairs.shape[0], 'problem')} x {counted(test.pairs.shape[1], 'draw')}"
    if test.groups is not None:
        size = f"{len({*test.groups})} groups of {size}"
    parts = [f"{visible(name)}: {verdict.label}. {before}% -> {after}%, {points} points ({interval}) on {size}"]
    if test.population == "these":
        parts.append(f"on new problems {notation.interval(*verdict.elsewhere, signed=True)}")
    if verdict.shows_nothing:
        parts.append("this can show nothing")
    if verdict.to_decide:
        parts.append(f"{verdict.to_decide} would decide")
    if control is not None:
        parts.append(_beside_control(verdict, is_control=name == control))
    return "; ".join(parts)


def _points(decision: Decision) -> tuple[str, str]:
    interval = notation.interval(decision.low, decision.high, signed=True)
    return notation.percent(decision.difference, signed=True), interval


def _beside_control(verdict: Verdict, *, is_control: bool) -> str:
    differ, both = verdict.texts
    texts = f"{differ:,} of {both:,} texts differ" if both else "the control"
    if is_control:
        return texts
    if verdict.beyond_control:
        return f"{texts}, and surely more answers change than in the control"
    few = f"{texts}, and no more answers surely change than in the control"
    return f"{few}, but more are lost than won" if verdict.label == "worse" else few


def _table(verdicts: Mapping[str, Verdict], sizes: Mapping[str, float]) -> pd.DataFrame:
    # A setting that lacks answers beats none.
    whole = [name for name in verdicts if name in sizes and np.isfinite(verdicts[name].test.pairs).all()]
    sized = [(name, sizes[name], verdicts[name].decision.difference) for name in whole]
    best = pareto_front(pd.DataFrame(sized, columns=["name", "bytes", "pass_at_1"]), "bytes")["name"].tolist()
    rows = []
    for name, verdict in verdicts.items():
        points, interval = _points(verdict.decision)
        row = {
            "setting": visible(name),
            "verdict": verdict.label,
            "accuracy": f"{notation.percent(verdict.accuracy + verdict.decision.difference)}%",
            "difference": f"{points} ({interval})",
            "lost/won": f"{(verdict.test.pairs < 0).sum():,}/{(verdict.test.pairs > 0).sum():,}",
            "to decide": verdict.to_decide,
        }
        if sizes:
            row["bytes"] = notation.number(sizes.get(name)) + (" (best)" if name in best else "")
        rows.append(row)
    return pd.DataFrame(rows)


def _notes_on_files(
    paths: Mapping[str, Sequence[Path]], outputs: Mapping[str, Outputs], baseline: str, reading: Reading
) -> Iterator[str]:
    """What a reader has to know of the files that were read."""
    shares = [f"{notation.percent(one.answers['correct'].mean())}% in {visible(name)}" for name, one in outputs.items()]
    if reading.graded:
        grades = dict.fromkeys(visible(str(one.grade)) for one in outputs.values())
        yield f"the grade is {' and '.join(grades):.80}, right in {', '.join(shares)}."
    for column, values in reading.where.items():
        taken = ", ".join(f"{len(one.answers):,} of {one.rows:,} of {visible(name)}" for name, one in outputs.items())
        yield f"rows with {visible(column)} {' or '.join(map(visible, values))} count: {taken}."
    places = {name: {path.resolve() for path in sources} for name, sources in paths.items()}
    for name, sources in paths.items():
        if any(path.is_dir() for path in sources):
            yield f"{name} is read from {' and '.join(map(str, outputs[name].files))}."
        if name != baseline and places[name] == places[baseline]:
            yield f"{name} is the file of {baseline}, read twice."


def _notes(answers: Answers, baseline: str) -> Iterator[str]:
    """What a reader has to know of the files."""
    for name, table in answers.items():
        of_all = f"of {len(table):,}"
        signs: Any = table["sign"].where(table["sign"].notna() | table["correct"].notna(), "no grade").value_counts()
        if len(signs):
            by_sign = ", ".join(f"{count:,} by {visible(sign):.60}" for sign, count in signs.items())
            unknown = f"{counted(signs.sum(), 'answer')} {of_all} are missing and not wrong"
            yield f"{name}: {unknown}, as no answer is known: {by_sign}."
        for reason, count in table["ending"][table["sign"].isna()].value_counts().items():
            if reason == "length":
                where = "at their longest or in their thinking"
                yield f"{name}: {counted(count, 'answer')} {of_all} were cut off, {where}."
            elif reason != "stop":
                ended = f"{counted(count, 'answer')} {of_all} ended by {reason!r}, which is no known end or limit"
                yield f"{name}: {ended}: the text alone says if it was cut off."
        if "theirs" in table:
            yield from _disagreements(name, table)
        for has, lacks in ((name, baseline), (baseline, name)):
            unused = ~answers[has]["draw"].isin(answers[lacks]["draw"])
            if unused.any():
                yield f"{has}: {counted(unused.sum(), 'answer')} are unused, of draws that {lacks} lacks."
            problems = sorted({*answers[has]["problem_id"]} - {*answers[lacks]["problem_id"]})
            if problems:
                shown = ", ".join(repr(visible(problem)) for problem in problems[:_NAMED])
                yield f"{has} alone has {counted(len(problems), 'problem')} beside {lacks}: {shown}."


def _disagreements(name: str, table: pd.DataFrame) -> Iterator[str]:
    both = table.dropna(subset=["theirs", "correct"])
    differ: Any = both[both["theirs"] != both["correct"]]
    words = [
        f"{visible(row.problem_id)} draw {row.draw} (ours {'right' if row.correct else 'wrong'})"
        for row in differ.head(_NAMED).itertuples()
    ]
    if len(both):
        yield f"{name}: {len(differ)} of {len(both):,} grades differ from the file's own: {'; '.join(words) or 'none'}."


def _texts_that_differ(first: pd.DataFrame, second: pd.DataFrame) -> tuple[int, int]:
    """How many texts differ, and how many both have."""
    both = first.merge(second, on=PAIR).dropna(subset=["text_x", "text_y"])
    return int((both["text_x"] != both["text_y"]).sum()), len(both)


def _notes_on_pairs(name: str, verdict: Verdict, baseline: str) -> Iterator[str]:
    """What a reader has to know of a setting's pairs with the baseline."""
    pairs = verdict.test.pairs
    missing = int(np.isnan(pairs).sum())
    if verdict.test.share < 1:
        draws = pairs.shape[1]
        way = "--ignore the text if it is the answer alone, or name it by --column text=NAME"
        these = f"{counted(draws, 'draw')} of a problem count as {notation.decimal(verdict.test.share * draws)}"
        yield f"{name}: {these}: the same text, or no text that tells draws from copies, adds nothing ({way})."
    if verdict.unused:
        yield f"{name}: {counted(verdict.unused, 'pair')} are unused, of draws that few problems have."
    if missing:
        lack = f"{missing:,} of {counted(pairs.size, 'pair')} with {baseline} lack"
        ends = "they count as lost in the lower end of the interval and as won in the upper one"
        yield f"{name}: {lack}. An engine may fail where it would be wrong, so {ends}."
    differ, both = verdict.texts
    if both and not differ:
        yield f"{name}: all {both:,} texts are those of {baseline}: check that the setting was on."
    elif 2 * differ >= both and not np.nan_to_num(pairs).any():
        grades = f"all {counted(pairs.size - missing, 'grade')} are those of {baseline}"
        yield f"{name}: {grades}: check that the column is the answer's grade and not the question's."


def _in_words(verdicts: Mapping[str, Verdict], baseline: str, margin: float) -> str:
    """What the labels and numbers speak of, and what to do next."""
    points = counted(notation.number(margin), "point")
    labels = {verdict.label for verdict in verdicts.values()}
    lines = [
        f"Safe: very likely loses less than {points} of accuracy against {visible(baseline)}. A setting that truly "
        f"loses {points} is called safe at most once in 40.",
        *(text for label, text in _LEGEND.items() if label in labels),
        f"Lost are the answers that are wrong where {visible(baseline)} is right in the same draw, won the other way "
        "around.",
    ]
    if any(verdict.test.population == "like_these" for verdict in verdicts.values()):
        lines.append(
            "A verdict on one draw, on copies or on groups is about problems like these: new draws say nothing."
        )
    if labels & {"safe", "worse", "small loss", _BETTER}:
        lines.append("Problems are taken as independent: variants of one question need --group COLUMN.")
    return "\n".join(lines)
