"""`kvsweep judge`: is one engine or setting worse than another, by the outputs of both?"""

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.outputs import (
    Answer,
    Asked,
    Outputs,
    copied,
    draws_differ,
    files_of,
    first_draws,
    graded,
    named,
    read_outputs,
    read_texts,
)
from kvsweep.analysis.questions import Questions, plain
from kvsweep.analysis.report.judged import judged_page, shown_pairs
from kvsweep.analysis.statistics import noninferiority
from kvsweep.analysis.statistics.inference import score_array
from kvsweep.analysis.statistics.metrics import pareto_front
from kvsweep.analysis.statistics.noninferiority import Decision, Floats, Population
from kvsweep.command_line import FAILED, UNCLEAR, counted
from kvsweep.errors import UserError
from kvsweep.escape import visible
from kvsweep.files import at_home, replace_text
from kvsweep.harness.benchmarks.golds import SOLUTION_END, read_gold
from kvsweep.harness.grading.answers import AnswerKind, Ungraded
from kvsweep.harness.grading.grader import Grader
from kvsweep.thinking import ThinkTags

_NAMED = 4  # problems or answers that a note names
_ENDS = ("stop", "length")
_NAME = re.compile(r"^(?:([^=/]+)=)?(.*)$", re.DOTALL)
_BATCH = 2000  # texts in memory while they are graded
# What would show that an unclear setting is safe, for each population of its test.
_DECIDE: Mapping[Population, str] = {"these": "draws to decide", "like_these": "problems to decide"}
# The label of a file that is safe by itself and was given among others.
_MAY_BE_SAFE = "may be safe"
_CONTROL = "Control: {} asked again. Beyond it are settings of which surely more answers are lost or won."
_LEGEND = {
    "unclear": "Unclear: too few answers, or some lack, as a note says.",
    _MAY_BE_SAFE: "May be safe: by itself, but of so many settings one may be so by luck; add draws or files.",
    "small loss": "Small loss: surely loses, and less than the margin.",
    "worse": "Worse: surely loses; how much is open.",
}


def judge(
    files: Sequence[str],
    *,
    full: str | None,
    control: str | None,
    margin: float,
    sizes: Mapping[str, float],
    asked: Asked,
    gold: Path | None,
    kind: AnswerKind,
    markdown: Path | None,
    html: Path | None,
) -> int:
    """Print a verdict on each setting beside the baseline; the exit status of the worst verdict.

    `files` are FILE or NAME=FILE, a folder in a file's place; files of one name are one setting.
    """
    if gold is not None and asked.graded:
        raise UserError(f"--gold {gold} is read by --grades ours alone: give both.")
    paths = _settings(files)
    read_from = {path.resolve() for path in itertools.chain(*paths.values(), [gold] if gold else [])}
    written = [path.resolve() for path in (markdown, html) if path is not None]
    if len({*written} - read_from) < len(written):
        raise UserError("--markdown and --html each write a file: name one that is none of the others.")
    baseline = next(iter(paths)) if full is None else full
    if control == baseline:
        raise UserError(f"--control {control} is the baseline: name the file of the baseline asked again.")
    if unknown := sorted({baseline, *sizes, *([control] if control else [])} - set(paths)):
        raise UserError(f"{unknown[0]} names none of the files: choose from {', '.join(paths)}.")
    questions = {name: Questions() for name in paths}
    read: Outputs = {name: read_outputs(path, asked, questions[name]) for name, path in paths.items()}
    for name, found in questions.items():
        _refuse_ids(found, name)
    taken = read if asked.graded else _regraded(read, paths, asked, gold, kind)
    copies = _copies(taken)
    outputs = {name: first_draws(answers) if name in copies else answers for name, answers in taken.items()}
    _refuse_shifted_draws(outputs, baseline)
    table, told = _verdicts(outputs, baseline, control, margin=margin / 100, sizes=sizes)
    for name in paths:
        several = all(len({answer.draw for answer in outputs[one]}) > 1 for one in (baseline, name))
        _refuse_other_questions(questions[baseline], questions[name], several, baseline, name)
    folders = {name: path for name, path in paths.items() if any(one.is_dir() for one in path)}
    told += [f"{name} is read from {named([one for one, _ in files_of(p, asked)])}." for name, p in folders.items()]
    told += [note for name in paths if taken is not read for note in _disagreements(name, read[name], taken[name])]
    told += [f"{name} has {how}: one draw of each problem counts." for name, how in copies.items()]
    places = {name: {one.resolve() for one in path} for name, path in paths.items()}
    same = [name for name, own in places.items() if name != baseline and own == places[baseline]]
    told += [f"{name} is the file of {baseline}, read twice." for name in same]
    print(*(f"note: {note}\n" for note in told), sep="", end="")
    words = _in_words(table, baseline, margin)
    print(table.to_string(index=False), words, sep="\n\n")
    if markdown is not None:
        lines = [[str(name) for name in table.columns], *table.astype(str).to_numpy().tolist()]
        replace_text(markdown, f"{notation.markdown(lines)}\n\n{words}\n")
    if html is not None:
        wanted = shown_pairs(outputs, baseline)
        texts = {n: {a.key: t for a, t in read_texts(p, asked) if t and a.key in wanted} for n, p in paths.items()}
        replace_text(html, judged_page(table, words, told, outputs, baseline, texts))
        print(html)
    labels = set(table["label"][table["setting"] != visible(control or "")]) or set(table["label"])
    return FAILED if "worse" in labels else UNCLEAR if labels & {"unclear", _MAY_BE_SAFE} else 0


def _copies(taken: Outputs) -> dict[str, str]:
    """The files whose draws are copies, or may be, each with the reason in words."""
    found, some_differ = dict[str, str](), any(map(draws_differ, taken.values()))
    for name, answers in taken.items():
        if how := copied((a.problem, a.text, a.correct) for a in answers):
            ignore = "--ignore text if the texts are answers alone"
            found[name] = f"the same text in all draws of {how}, as greedy decoding writes it ({ignore})"
        elif not some_differ and len({answer.draw for answer in answers}) > 1:
            way_out = " (--column text=NAME)" if all(answer.text is None for answer in answers) else ""
            found[name] = f"one grade in all draws of each problem, and no text that tells them from copies{way_out}"
    return found


def _settings(words: Sequence[str]) -> dict[str, list[Path]]:
    """The files of each setting, by its name: the one before an equals sign, or else the file's."""
    pairs = [("", word) if Path(word).exists() else _NAME.findall(word)[0] for word in words]
    files = [Path(at_home(path)) for _, path in pairs]
    # Programs name the outputs of each run alike, in a folder for each.
    stems = [path.name if path.is_dir() else path.stem for path in files]
    folders = [path.absolute().parent.name for path in files]
    own = folders if len(set(stems)) < len(stems) == len(set(folders)) else stems
    found, titles = dict[str, list[Path]](), [name or title for (name, _), title in zip(pairs, own, strict=True)]
    for title, path in zip(titles, files, strict=True):
        found.setdefault(title, []).append(path)
    if len(files) < 2:
        raise UserError(f"{counted(len(files), 'file')} cannot be compared: give two or more, the baseline first.")
    unnamed = [title for (name, _), title in zip(pairs, titles, strict=True) if not name]
    if len(found) < 2 or any(titles.count(title) > 1 for title in unnamed):
        given = f"{counted(len(files), 'file')} and the names {visible(', '.join(titles))}"
        raise UserError(f"{given}: give two files or more, and name each NAME=FILE; files of one name are one setting.")
    return found


def _regraded(
    read: Outputs, paths: Mapping[str, Sequence[Path]], asked: Asked, gold: Path | None, kind: AnswerKind
) -> Outputs:
    """The answers with the grades that `kvsweep grade` would give."""
    rows = [] if gold is None else [one for one, _ in read_texts(gold, Asked(graded=False))]
    golds, ours = {one.problem: one.gold for one in rows}, dict[str, list[Answer]]()
    if wrong := [one for one in rows if one.gold is None or one.gold != golds[one.problem]]:
        raise UserError(
            f"{gold} has not one gold for problem {visible(wrong[0].problem)!r:.60}: write rows of id and gold."
        )
    asked_of = {one.problem for found in read.values() for one in found}
    if gold and (lacking := sorted(asked_of - golds.keys())):
        these = f"{len(lacking)} of {len(asked_of)} problems, such as {visible(lacking[0])!r:.60}"
        mend = "give each problem's gold under the id that the outputs have, or leave out --gold"
        raise UserError(f"{gold} has no gold for {these}: {mend}.")
    read = _with_thinking(read)
    tags = _tags_of_files(read)
    with Grader() as grader:
        for name, path in paths.items():
            if all(one.text is None for one in read[name]):
                raise UserError(f"{named(path)} has no text: give --column text=NAME, or leave out --grades ours.")
            texts = zip(read[name], read_texts(path, asked), strict=True)
            jobs = (_job(a, text, path, golds.get(a.problem, a.gold), kind, tags[name]) for a, (_, text) in texts)
            ours[name] = list(_graded(grader, read[name], jobs))
    return ours


def _graded(grader: Grader, answers: Sequence[Answer], jobs: Iterator[Ungraded | None]) -> Iterator[Answer]:
    """The answers with our grades; an answer without a text has none."""
    left = iter(answers)
    while batch := list(itertools.islice(jobs, _BATCH)):
        verdicts = iter(grader.judge([job for job in batch if job]))
        for one, job in zip(itertools.islice(left, len(batch)), batch, strict=True):
            right = None if job is None else float(next(verdicts).outcome == "correct")
            ending = "length" if job and job.stop_reason == "length" else one.ending
            yield one._replace(correct=right, column=None, grade=None, ending=ending)


def _with_thinking(read: Outputs) -> Outputs:
    """The answers without a thinking of any name whose tags fewer than half of the texts of each file close."""
    counts = [
        (Counter(t.tags for one in side if (t := one.thinking) and t.closes), len(side)) for side in read.values()
    ]
    known = {tags for count, size in counts for tags in count if 2 * count[tags] >= size}

    def shown(one: Answer) -> Answer:
        own = one.thinking
        return one if own is None or own.named or own.tags in known else one._replace(thinking=None)

    return {name: [*map(shown, answers)] for name, answers in read.items()}


def _tags_of_files(read: Outputs) -> dict[str, ThinkTags | None]:
    """The tags of each file whose prompts open the thinking; None where each text shows by itself if it thinks.

    Half of the texts of some file close a thinking that they do not open. Where a file has few of such texts, or none
    beside a file that has them, an answer and a text that was cut off look alike, unless the file names the endings.
    """
    closing = {
        name: [seen.tags for one in answers if (seen := one.thinking) and seen.closes and not seen.opens]
        for name, answers in read.items()
    }
    known = {name: tags[0] for name, tags in closing.items() if 2 * len(tags) >= len(read[name])}
    found = dict[str, ThinkTags | None]()
    for name, answers in read.items():
        own, theirs = closing[name], [*closing[name], *known.values()]
        found[name] = own[0] if own and known else None
        unsure = any(one.text is not None and one.thinking is None and one.ending not in _ENDS for one in answers)
        if theirs and unsure and found[name] is None:
            share = f"{len(own):,} of {len(answers):,} texts close their thinking with {theirs[0].end}"
            why = "an answer and a text that was cut off in its thinking look alike"
            mend = "--column stop_reason=NAME names the column that tells them apart"
            raise UserError(f"{visible(name)}: {share}, so that {why}: {mend}, or drop all thinking from the texts.")
    return found


def _job(
    one: Answer, text: str | None, path: Sequence[Path], gold: object, kind: AnswerKind, of_file: ThinkTags | None
) -> Ungraded | None:
    if text is None and one.ending != "length":
        return None
    text = text or ""  # a server sends no content where the thinking took all tokens
    place = f"{named(path)}: problem {visible(one.problem)!r:.60}, draw {one.draw} has"
    if gold is None:
        raise UserError(f"{place} no gold: give --gold FILE.")
    try:  # GSM8K's target is a worked solution
        right = read_gold(gold.rpartition(SOLUTION_END)[2] if isinstance(gold, str) else gold, kind)
    except ValueError as error:
        raise UserError(f"{place} the gold {visible(str(gold))!r:.60}, which {error}: correct it or --kind.") from None
    own = one.thinking
    tags = own.tags if own and (own.opens or of_file is None) else of_file
    rule = {"tags": dataclasses.asdict(tags)} if tags else {"answer_from": "whole_text"}
    ended = one.ending != "length" and (tags is None or tags.closing(text) is not None)
    return Ungraded(text=text, stop_reason="stop" if ended else "length", gold=right, kind=kind, rule=rule)


def _disagreements(name: str, theirs: Sequence[Answer], ours: Sequence[Answer]) -> Iterator[str]:
    both = zip(ours, theirs, strict=True)
    pairs = [(one, old.correct) for one, old in both if None not in (one.correct, old.correct)]
    differ = [one for one, old in pairs if one.correct != old]
    words = [f"{one.problem} draw {one.draw} (ours {'right' if one.correct else 'wrong'})" for one in differ[:_NAMED]]
    shown = ": " * bool(words) + "; ".join(map(visible, words)) + "; ..." * (len(differ) > _NAMED)
    if pairs:
        yield f"{name}: {len(differ)} of {len(pairs):,} grades differ from the file's own{shown}."


def _verdicts(
    outputs: Outputs, baseline: str, control: str | None, *, margin: float, sizes: Mapping[str, float]
) -> tuple[pd.DataFrame, list[str]]:
    """A row per setting: label, difference in points with both intervals, what is lost and won, declared bytes.

    With it comes what a reader has to know of the pairs. Golds, prompts and names of grades that differ, and settings
    without a pair raise a UserError. The correction for the number of settings, and the search for one to take, are
    those of a sweep (docs/report.md), without the control.
    """
    known = {one.problem: one for one in outputs[baseline]}
    shared = {name: [one for one in answers if one.problem in known] for name, answers in outputs.items()}
    scores = dict(zip(outputs, score_array(graded(shared), list(outputs)), strict=True))
    full = scores.pop(baseline)
    losable = noninferiority.can_lose(full, margin)
    told = [*_grade_columns(outputs), *_lone_draws(outputs, baseline)]
    told += [note for name in outputs for note in _notes(known, outputs[name], baseline, name)]
    if not losable:
        told.insert(0, f"{baseline} is right in at most {notation.percent(margin)}%: nothing is safe beside it.")
    tried = {name: one for name, one in scores.items() if name != control}
    found = _decisions(tried, full, margin)
    if control:
        found |= _decisions({control: scores[control]}, full, margin)
    if nothing := [name for name, one in found.items() if notation.missing(one.difference)]:
        for name in (baseline, nothing[0]):
            if all(one.correct is None for one in outputs[name]):
                raise UserError(f"{visible(name)} has no grade in any row: write 1 or 0, or give --grades ours.")
        raise UserError(f"{baseline} and {nothing[0]} share no graded pair of problem and draw: check ids and draws.")
    # A sequence from the largest cache down needs all sizes; without them Holm's procedure decides alone.
    chains = [sorted(tried, key=lambda name: -sizes[name])] if tried.keys() <= sizes.keys() else []
    taken = noninferiority.hold_in_search({name: found[name].p_holds for name in tried}, chains) | {control}
    rows, whole, populations = dict[str, dict[str, object]](), list[str](), set[Population]()
    for name, one in found.items():
        pairs = noninferiority.paired(scores[name], full)
        lead = np.nansum(pairs, 1)
        whole += [name] * bool(np.isfinite(pairs).all())
        told += _uneven(name, baseline, pairs, noninferiority.differences(scores[name], full))
        told += _same_grades(name, baseline, outputs, pairs)
        population, elsewhere = _population(pairs), one
        populations.add(population)
        if population == "these":
            elsewhere = noninferiority.decide(scores[name], full, margin=margin, population="like_these")
        plan = noninferiority.draws_to_hold if population == "these" else noninferiority.problems_to_hold
        undecided = losable and one.label == "unclear"
        needed = f"{plan(scores[name], full, margin=margin):,}" if undecided else ""
        rows[name] = {
            "setting": visible(name),
            "label": _MAY_BE_SAFE if one.label in ("safe", "small loss") and name not in taken else one.label,
            "points": notation.percent(one.difference, signed=True),
            "interval": notation.interval(one.low, one.high, signed=True),
            "problems like these": notation.interval(elsewhere.low, elsewhere.high, signed=True),
            "lost": int((pairs < 0).sum()),
            "won": int((pairs > 0).sum()),
            "problems lost": int((lead < 0).sum()),
            "problems won": int((lead > 0).sum()),
            "problems": len(lead),
            "draws": one.draws,
            **dict.fromkeys(_DECIDE.values(), ""),
            _DECIDE[population]: needed,
            "bytes (declared)": notation.number(sizes[name]) if name in sizes else "",
        }
    table = pd.DataFrame([*rows.values()])
    aside = [column for population, column in _DECIDE.items() if population not in populations]
    table = table.drop(columns=aside + ["problems like these"] * ("these" not in populations))
    if sizes:
        sized = [(sizes[name], found[name].difference, name) for name in whole if name in sizes]
        best = pareto_front(pd.DataFrame(sized, columns=["bytes", "pass_at_1", "name"]), "bytes")["name"]
        table["best of its bytes"] = ["yes" if name in set(best) else "" for name in found]
    if control:
        differing = {name: _texts_that_differ(outputs[baseline], outputs[name]) for name in found}
        table["texts differ"] = [f"{own:,} of {of:,}" if of else "" for own, of in differing.values()]
        beyond = {
            name
            for population, own in _by_population(tried, full)
            for name in noninferiority.beyond_control(own, full, scores[control], population=population)
        }
        table["beyond control"] = ["yes" if name in beyond else "no" for name in tried] + ["control"]
    return table, told


def _population(pairs: Floats) -> Population:
    """What a label speaks of, as in a report: greedy answers, which one draw may be, have no new draws."""
    return "these" if pairs.shape[1] > 1 else "like_these"


def _by_population(cells: Mapping[str, Floats], full: Floats) -> Iterator[tuple[Population, dict[str, Floats]]]:
    found = {name: _population(noninferiority.paired(one, full)) for name, one in cells.items()}
    for population in _DECIDE:
        if own := {name: one for name, one in cells.items() if found[name] == population}:
            yield population, own


def _decisions(cells: Mapping[str, Floats], full: Floats, margin: float) -> dict[str, Decision]:
    found = dict[str, Decision]()
    for population, own in _by_population(cells, full):
        found |= noninferiority.decide_grid(own, full, margin=margin, population=population, family=len(cells))
    return {name: found[name] for name in cells}


def _grade_columns(outputs: Outputs) -> Iterator[str]:
    """A sentence on each column that grades were read from: a reader sees if it is none."""
    files = defaultdict[str, list[str]](list)
    for name, answers in outputs.items():
        columns = sorted({one.column for one in answers if one.column is not None})
        right = [one.correct for one in answers if one.correct is not None]
        if columns and right:
            files[" and ".join(columns)].append(f"{notation.percent(sum(right) / len(right))}% in {name}")
    for column, shares in files.items():
        yield f"the grade is {visible(column):.80}, right in {', '.join(map(visible, shares))}."


def _lone_draws(outputs: Outputs, baseline: str) -> Iterator[str]:
    draws = {name: {one.draw for one in answers} for name, answers in outputs.items()}
    for name in outputs:
        for has, lacks in ((name, baseline), (baseline, name)):
            alone = draws[has] - draws[lacks]
            if lone := sum(one.draw in alone for one in outputs[has]):
                yield f"{has}: {counted(lone, 'answer')} are unused, of draws that {lacks} lacks."


def _same_grades(name: str, baseline: str, outputs: Outputs, pairs: Floats) -> Iterator[str]:
    column = outputs[name][0].column
    if column is None or np.nan_to_num(pairs).any():
        return
    differ, both = _texts_that_differ(outputs[baseline], outputs[name])
    if 2 * differ >= both:
        these = f"all {counted(int(np.isfinite(pairs).sum()), 'grade')} are those of {baseline}"
        yield f"{name}: {these}: check that {visible(column):.40} is the answer's grade and not the question's."


def _texts_that_differ(ours: Sequence[Answer], theirs: Sequence[Answer]) -> tuple[int, int]:
    """How many texts differ, and how many both have."""
    texts = {one.key: one.text for one in ours if one.text is not None}
    both = [one.text != texts[one.key] for one in theirs if one.text is not None and one.key in texts]
    return sum(both), len(both)


def _uneven(name: str, baseline: str, pairs: Floats, found: Floats) -> Iterator[str]:
    """Sentences on pairs that lack, and on those of draws that few problems have."""
    if lacks := int(np.isnan(pairs).sum()):
        asked = f"{lacks:,} of {counted(pairs.size, 'pair')} with {baseline} lack"
        ends = "they count as lost in the lower end of the interval and as won in the upper one"
        yield f"{name}: {asked}. An engine may fail where it would be wrong, so {ends}."
    if unused := int(np.isfinite(found).sum() - np.isfinite(pairs).sum()):
        yield f"{name}: {counted(unused, 'pair')} are unused, of draws that few problems have."


def _notes(known: Mapping[str, Answer], own: Sequence[Answer], full: str, name: str) -> Iterator[str]:
    for one in own:
        _check_alike(known.get(one.problem, one), one, full, name)
    problems = {one.problem for one in own}
    for said, alone in (("alone has", problems - known.keys()), ("lacks", known.keys() - problems)):
        shown = ", ".join(repr(visible(one)) for one in sorted(alone)[:_NAMED]) + ", ..." * (len(alone) > _NAMED)
        if alone:
            yield f"{name} {said} {counted(len(alone), 'problem')} beside {full}: {shown}."
    if cut := sum(one.truncated for one in own):
        yield f"{name}: {counted(cut, 'answer')} of {len(own):,} were cut off, at their longest or in their thinking."
    for reason, count in Counter(one.ending for one in own if one.ending not in (*_ENDS, None)).items():
        ended = f"{counted(count, 'answer')} of {len(own):,} ended by {reason!r}, which is no known end or limit"
        yield f"{name}: {ended}: the text alone says if it was cut off."
    if ungraded := sum(one.correct is None for one in own):
        yield f"{name}: {counted(ungraded, 'answer')} of {len(own):,} have no grade."


def _check_alike(ours: Answer, theirs: Answer, baseline: str, name: str) -> None:
    for what in ("gold", "prompt", "grade"):
        values = [getattr(side, what) for side in (ours, theirs)]
        pair = [] if values[0] == values[1] else [plain(value) or None for value in values if value is not None]
        if len({*pair} - {None}) > 1:
            files = f"{name} has" if name == baseline else f"{baseline} and {name} have"
            two = f"{what} {pair[0]!r:.60} and {pair[1]!r:.60} for problem {visible(ours.problem)!r:.60}"
            way = "--correct NAME, --where filter=NAME" if what == "grade" else f"--column {what}=NAME or --ignore NAME"
            raise UserError(f"{files} {two}: give outputs of the same questions and grades, or choose by {way}.")


def _refuse_ids(questions: Questions, name: str) -> None:
    if many := questions.of_many_ids():
        has = f"{visible(name)} has {many[0]:,} ids for {many[1]:,} questions, so that draws would count as problems"
        mend = "--column id=NAME names the problem's id and --column draw=NAME the draw"
        raise UserError(f"{has}: {mend}, or --ignore a column that is no part of the question.")


def _refuse_shifted_draws(outputs: Outputs, baseline: str) -> None:
    """Raise UserError for draws that one file counts from 0 and another from 1."""
    draws = {name: {one.draw for one in answers} for name, answers in outputs.items()}
    for name in outputs:
        first, other = sorted((name, baseline), key=lambda one: min(draws[one], default=0))
        if min(draws[first], default=1) == 0 and {draw + 1 for draw in draws[first]} == draws[other]:
            pairs = "answers are paired by the number of the draw"
            raise UserError(f"{first} counts its draws from 0 and {other} from 1: count both alike; {pairs}.")


def _refuse_other_questions(ours: Questions, theirs: Questions, several: bool, full: str, name: str) -> None:
    if differ := list(ours.differing(theirs, several=several)):
        columns = ", ".join(visible(column) for column, _ in differ)
        other = f"{full} and {name} differ in {columns:.200} for problem {visible(differ[0][1])!r:.60}"
        mend = f"--ignore {visible(differ[0][0])} if that is no part of the question"
        raise UserError(f"{other}: give outputs of the same questions, or {mend} (repeatable).")


def _in_words(table: pd.DataFrame, baseline: str, margin: float) -> str:
    """What the labels and numbers speak of, and what to do next."""
    points, labels = counted(notation.number(margin), "point"), set(table["label"])
    greedy = "greedy answers have no new draws"
    on = "these problems asked again" if "problems like these" in table else f"problems like these: {greedy}"
    lines = [
        f"Safe: very likely loses less than {points} of accuracy against {visible(baseline)}, on {on}. A setting that "
        f"truly loses {points} is called safe at most once in 40.",
        *(text for label, text in _LEGEND.items() if label in labels),
        *(
            f'"{column.capitalize()}": so many would show that an unclear setting is safe (90%).'
            for column in _DECIDE.values()
            if column in table
        ),
        *[_CONTROL.format(visible(baseline))] * ("beyond control" in table),
        f"Lost are the answers that are wrong where {visible(baseline)} is right in the same draw, won the other way "
        "around. A problem is lost if it loses more answers than it wins, and won the other way around.",
        *['For other problems read "problems like these".'] * ("problems like these" in table),
    ]
    if {*_DECIDE.values()} <= {*table}:
        lines.append(f"The label of a setting with one draw is about problems like these: {greedy}.")
    return "\n".join(lines)
