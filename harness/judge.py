"""`kvsweep judge`: is one engine or setting worse than another, by the outputs of both?

The grader and the page load slowly, and few files need them: functions import them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.answers import GREEDY_BELOW, counted_shares
from kvsweep.analysis.outputs import PAIR, Outputs, Reading, read_outputs
from kvsweep.analysis.questions import one_per_problem, refuse_unlike, refuse_unpaired
from kvsweep.analysis.statistics import noninferiority
from kvsweep.analysis.statistics.metrics import pareto_front
from kvsweep.analysis.statistics.noninferiority import LEVEL, Decision, Floats, Groups, PairedTest
from kvsweep.messages.command_line import FAILED, UNCLEAR, counted
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible
from kvsweep.run_files.safe_files import at_home, replace_text
from kvsweep.run_files.thinking import Thinking, ThinkTags, thinking_of, without_end

_NAMED = 4  # problems or answers that a note names
_OFTEN = 0.05  # of the problems have one text, which may be no answer
_ENDS = ("stop", "length")
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

    decision: Decision
    test: PairedTest
    accuracy: float  # the baseline's, on the same pairs
    shows_nothing: bool  # so few pairs leave even equal answers open
    to_decide: str  # how much would show that an unclear setting is safe, if it equals the baseline: "48 draws"
    texts: tuple[int, int]  # how many differ, and how many there are
    unused: int  # pairs, of draws that few problems have
    is_taken: bool  # also safe as one of several
    beyond_control: bool

    @property
    def label(self) -> str:
        label = self.decision.label
        if label in ("safe", "small loss") and not self.is_taken:
            return _MAY_BE_SAFE
        if label == "safe" and self.decision.low > 0:
            return _BETTER
        return label


def judge(
    files: Sequence[str],
    *,
    full: str | None,
    control: str | None,
    margin: float,
    sizes: Mapping[str, float],
    reading: Reading,
    gold: Path | None,
    kind: str,
    markdown: Path | None,
    html: Path | None,
) -> int:
    """Print a verdict on each setting beside the baseline; return the exit status of the worst verdict.

    `files` are FILE or NAME=FILE, a folder in a file's place; files of one name are one setting. `kind` is the grader's
    `AnswerKind`, by which texts are graded again. `markdown` and `html` are files to write.
    """
    if gold is not None and reading.graded:
        raise UserError(f"--gold {gold} is read by --grades ours alone: give both.")
    paths = _settings(_names_and_files(files))
    baseline = next(iter(paths)) if full is None else full
    if control == baseline:
        raise UserError(f"--control {control} is the baseline: name the file of the baseline asked again.")
    # Without a control the baseline is looked up twice.
    for name in (baseline, control or baseline, *sizes):
        if name not in paths:
            raise UserError(f"{visible(name)} names none of the files: choose from {', '.join(paths)}.")
    outputs = {name: read_outputs(source, reading) for name, source in paths.items()}
    refuse_unlike(outputs, baseline, reading.ignored)
    refuse_unpaired(outputs, baseline)
    answers: Answers = {name: setting.answers for name, setting in outputs.items()}
    if not reading.graded:
        answers = _regraded(answers, gold, kind)
    verdicts = judged(answers, baseline, control, margin=margin / 100, sizes=sizes)
    sentences = {name: _sentence(name, verdict, control) for name, verdict in verdicts.items()}
    notes = [*_notes_on_files(paths, outputs, reading), *_notes_on_answers(answers, baseline)]
    if answers[baseline]["correct"].mean() <= margin / 100:
        notes.insert(0, f"{baseline} is right in at most {notation.number(margin)}%: nothing is safe beside it.")
    for name, verdict in verdicts.items():
        notes += _notes_on_pairs(name, verdict, baseline)
    words = [*_in_words(verdicts, baseline, margin)]
    table = _table(verdicts, sizes)
    shown = [f"note: {note}" for note in notes]
    print(*sentences.values(), "", table.to_string(index=False), "", *shown, "", *words, sep="\n")
    if markdown is not None:
        rows = notation.markdown([[*table.columns], *table.to_numpy().tolist()])
        above_table = map(notation.markdown_text, sentences.values())
        below_table = map(notation.markdown_text, [*notes, *words])
        replace_text(markdown, "\n\n".join([*above_table, rows, *below_table, ""]))
    if html is not None:
        from kvsweep.analysis.report.judged import judged_page

        replace_text(html, judged_page(table, sentences, words, notes, answers, baseline))
        print(html)
    # The control's verdict counts only if it is the only one.
    labels = {verdict.label for name, verdict in verdicts.items() if name != control or len(verdicts) == 1}
    if "worse" in labels:
        return FAILED
    return UNCLEAR if labels & {"unclear", _MAY_BE_SAFE} else 0


# --- files ---------------------------------------------------------------------------------------------------


def remove_verdicts(options: Mapping[str, Any]) -> None:
    """Remove what an earlier run wrote at `--markdown` and `--html`, so that no refusal leaves its verdict.

    Raises UserError if both are one file, or one is among those to read.
    """
    _, sources = zip(*_names_and_files(options["files"]), strict=True)
    written = [*filter(None, [options["markdown"], options["html"]])]
    read = {path.resolve() for path in (*sources, options["gold"]) if path}
    only_written = {path.resolve() for path in written} - read
    # Fewer are left if both are one file, or if one is among those to read.
    if len(only_written) < len(written):
        raise UserError("--markdown and --html each write a file: name one that is none of the others.")
    for path in written:
        path.unlink(missing_ok=True)


def _names_and_files(words: Sequence[str]) -> list[tuple[str, Path]]:
    """The name before each word's equals sign, empty if there is none, and the file."""
    sources = []
    for word in words:
        name, sign, path = word.partition("=")  # "int8=runs/b.csv" -> "int8", "=", "runs/b.csv"
        # An equals sign may be part of the file's path, as in "runs/a=b.csv".
        if Path(word).exists() or not sign or not name or "/" in name:
            name, path = "", word
        sources.append((name, Path(at_home(path))))
    return sources


def _settings(sources: Sequence[tuple[str, Path]]) -> dict[str, list[Path]]:
    """The files of each setting, by its name, or else the file's."""
    counts = Counter(file.resolve() for _, file in sources)
    for file, count in counts.items():
        if count > 1:
            raise UserError(
                f"{file} is given {count} times: beside itself a file shows nothing, so give each file once."
            )
    settings = defaultdict[str, list[Path]](list)
    unnamed = []
    for name, file in sources:
        title = file.name if file.is_dir() else file.stem
        settings[name or title].append(file)
        if not name:
            unnamed.append(title)
    # Only files with a name before an equals sign may be one setting together.
    if len(settings) < 2 or any(len(settings[title]) > 1 for title in unnamed):
        raise UserError(
            f"{counted(len(sources), 'file')} and the names {visible(', '.join(settings))}: give two files or more, "
            "and name each NAME=FILE; files of one name are one setting."
        )
    return settings


# --- grades --------------------------------------------------------------------------------------------------


def _regraded(answers: Answers, gold: Path | None, kind: Any) -> Answers:
    """The answers with the grades that `kvsweep grade` would give, and the file's own as `theirs`."""
    from kvsweep.harness.grading.grader import Grader

    if gold is not None:
        source = read_outputs([gold], Reading(graded=False))
        golds = one_per_problem(source.questions[["gold"]], source.answers)["gold"]
    tags_of_texts = _tags_of_texts(answers)
    regraded = {}
    with Grader() as grader:
        for name, table in answers.items():
            if table["text"].isna().all():
                raise UserError(f"{name} has no text: give --column text=NAME, or leave out --grades ours.")
            table = table.assign(tags=tags_of_texts[name])
            if gold is not None:
                table["gold"] = table["problem_id"].map(golds)
            # Other rows have no known answer. Of a text that was cut off a server may send nothing.
            answered = table[table["sign"].isna() & (table["text"].notna() | table["ending"].eq("length"))]
            jobs = [_job(row, kind) for row in answered.itertuples()]
            graded = [verdict.outcome for verdict in grader.judge(jobs)]
            outcomes = pd.Series(graded, index=answered.index, dtype=object).reindex(table.index)
            overran = outcomes.eq("grader_timeout")  # these answers have no grade, and are not wrong
            # Also texts that `_job` has seen end in their thinking.
            cut_off = answered.index[[job.stop_reason == "length" for job in jobs]]
            regraded[name] = table.assign(
                theirs=table["correct"],
                # 1 or 0, as the file's grades are, and NaN without a grade.
                correct=outcomes.eq("correct").astype(float).where(outcomes.notna() & ~overran),
                sign=table["sign"].mask(overran, "the grader's time-out"),
                ending=table["ending"].mask(table.index.isin(cut_off), "length"),
            )
    return regraded


def _tags_of_texts(answers: Answers) -> dict[str, list[Any]]:
    """The tags around the thinking of each text, by file; None for a text that shows none.

    Tags of any name are those of thinking if half of the texts of some file close them. Prompts open the thinking if
    half of the texts of some file close one that they do not open. Where a file has few of such texts, or none beside a
    file that has them, an answer and a text that was cut off look alike. There a UserError is raised if the end of a
    text is not known.
    """
    # Of each file, by the row's index, the texts that show a thinking.
    thinking: dict[str, Any] = {name: table["text"].map(_thinking).dropna() for name, table in answers.items()}
    usual_tags = set[ThinkTags]()  # that half of the texts of some file close
    for name, shown in thinking.items():
        counts = Counter(text.tags for text in shown if text.closes)
        usual_tags.update(tags for tags, count in counts.items() if 2 * count >= len(answers[name]))
    unopened = {}  # of each file, the tags of texts that close a thinking which they do not open
    opened_by_prompts = []  # such tags, of a file where prompts open the thinking
    for name, shown in thinking.items():
        # Without a name of thinking, and if few texts of each file close them, tags are marks of the answer.
        thinking[name] = shown[[text.named or text.tags in usual_tags for text in shown]]
        unopened[name] = [text.tags for text in thinking[name] if text.closes and not text.opens]
        if 2 * len(unopened[name]) >= len(answers[name]):
            opened_by_prompts.append(unopened[name][0])
    tags_of_texts = {}
    for name, table in answers.items():
        opened = None  # by the prompts of this file
        if unopened[name] and opened_by_prompts:
            # If the prompts of some file open the thinking, one such text shows that those of this file do, too.
            opened = unopened[name][0]
        elif unopened[name] or opened_by_prompts:
            # A few texts of this file close what they do not open, and half of no file's do; or none does, and half of
            # another file's do.
            unknown_ends = table.index[table["text"].notna() & ~table["ending"].isin(_ENDS)]
            if not unknown_ends.isin(thinking[name].index).all():
                [tags, *_] = [*unopened[name], *opened_by_prompts]
                raise UserError(
                    f"{visible(name)}: {len(unopened[name]):,} of {len(table):,} texts close their thinking with "
                    f"{tags.end}, so that an answer and a text that was cut off in its thinking look alike: --column "
                    "stop_reason=NAME names the column that tells them apart, or drop all thinking from the texts."
                )
        # The tags that a text opens come first; tags that it only closes serve where the file has none.
        shown_tags = {row: text.tags for row, text in thinking[name].items() if text.opens or not opened}
        tags_of_texts[name] = [shown_tags.get(row, opened) for row in table.index]
    return tags_of_texts


def _thinking(text: str | None) -> Thinking | None:
    """What a text shows of its thinking, by tags with a name of thinking or else of any name; None if it shows none.

    A token that ends a text looks like a tag of any name, so it is removed before those are looked for.
    """
    return None if text is None else thinking_of(text) or thinking_of(without_end(text), named=False)


def _job(row: Any, kind: Any) -> Any:
    """What to grade of a row of answers with `tags`."""
    from kvsweep.harness.benchmarks.golds import SOLUTION_END, read_gold
    from kvsweep.harness.grading.answers import Rule, Ungraded

    place = f"{row.place}: problem {visible(row.problem_id)!r:.60}, draw {row.draw}"
    gold = row.gold
    if gold is None or gold != gold:  # NaN
        raise UserError(f"{place} has no gold: give it, or those of all problems by --gold FILE.")
    if isinstance(gold, str):
        gold = gold.rpartition(SOLUTION_END)[2]  # GSM8K's target is a worked solution
    try:
        gold = read_gold(gold, kind)
    except ValueError as error:
        raise UserError(
            f"{place} has the gold {visible(str(row.gold))!r:.60}, which {error}: correct it or --kind."
        ) from None
    text = row.text or ""
    rule = Rule(answer_from="whole_text")
    # A reason that is not understood counts as a stop: then the text alone says if it was cut off.
    stop_reason = "length" if row.ending == "length" else "stop"
    if row.tags:
        rule = Rule(tags=row.tags)
        if row.tags.closing(text) is None:  # cut off in its thinking
            stop_reason = "length"
    return Ungraded(text, stop_reason, gold, kind, rule)


# --- verdicts ------------------------------------------------------------------------------------------------


def _score_arrays(answers: Answers, baseline: str) -> tuple[dict[str, Floats], Groups]:
    """Each file's grades of the baseline's problems, [problems, draws], and each problem's group."""
    # A row for each problem, a column for each draw.
    full = answers[baseline].set_index(PAIR)["correct"].unstack()
    scores = {}
    for name, table in answers.items():
        scores[name] = table.set_index(PAIR)["correct"].unstack().reindex_like(full).to_numpy(float)
    if "group" not in answers[baseline]:
        return scores, None
    values: Any = answers[baseline].groupby("problem_id")["group"]
    if values.nunique().max() > 1:
        problem = values.nunique().idxmax()
        raise UserError(f"problem {problem!r:.60} has several values of --group: name another column.")
    return scores, pd.factorize(values.first()[full.index])[0]  # a number for each value of the column


def judged(
    answers: Answers, baseline: str, control: str | None, *, margin: float, sizes: Mapping[str, float]
) -> dict[str, Verdict]:
    """The verdict on each setting beside the baseline.

    The correction for the number of settings, and the search for one to take, are those of a sweep (docs/report.md),
    without the control. `sizes` are the bytes, by setting.
    """
    scores, groups = _score_arrays(answers, baseline)
    shares = counted_shares(answers)  # of each setting, the share of its draws that are no copies
    full = scores.pop(baseline)
    tests = {}
    for name, cell in scores.items():
        tests[name] = _test(cell, full, min(shares[name], shares[baseline]), groups)
        if not tests[name].pairs.size:
            _refuse_no_pair(answers, baseline, name)
    losable = noninferiority.can_lose(full, margin)
    # The control is compared like a setting, but is none: it is not corrected for.
    tried = {name: test for name, test in tests.items() if name != control}
    decisions = noninferiority.decide_tests(tried, losable, margin=margin)
    chains = []
    if tried.keys() <= sizes.keys():
        # A sequence from the largest cache down needs all sizes; without them Holm's procedure decides alone.
        chains.append(sorted(tried, key=sizes.__getitem__, reverse=True))
    p_holds = {name: decision.p_holds for name, decision in decisions.items()}
    # The control is no setting to take, so the search does not change its label.
    taken = noninferiority.hold_in_search(p_holds, chains) | {control}
    beyond = set[str]()
    if control:
        decisions |= noninferiority.decide_tests({control: tests[control]}, losable, margin=margin)
        cells = {name: scores[name] for name in tried}
        beyond = noninferiority.beyond_control(tests, cells, full, scores[control])
    verdicts = {}
    for name, test in tests.items():
        cell = scores[name]
        graded = np.where(np.isfinite(cell), full, np.nan)  # the baseline's grades, of pairs alone
        equal = replace(test, pairs=np.zeros_like(test.pairs))  # the test, had all grades been equal
        unclear = losable and decisions[name].label == "unclear"
        shows_nothing = unclear and equal.lower_end(LEVEL) <= -margin
        verdicts[name] = Verdict(
            decision=decisions[name],
            test=test,
            # The difference to a cache that solves nothing: problems have the weights that they have in the decision.
            accuracy=noninferiority.paired_test(graded, np.zeros_like(full), groups=groups).difference,
            shows_nothing=shows_nothing,
            to_decide=_to_decide(test, margin, shows_nothing) if unclear else "",
            texts=_texts_that_differ(answers[baseline], answers[name]),
            # `paired` leaves out draws that few problems have.
            unused=np.isfinite(cell - full).sum() - np.isfinite(test.pairs).sum(),
            is_taken=name in taken,
            beyond_control=name in beyond,
        )
    return verdicts


def _test(cell: Floats, full: Floats, share: float, groups: Groups) -> PairedTest:
    """The test of a setting beside the baseline; a `share` of its draws are no copies."""
    test = noninferiority.paired_test(cell, full, "these", share, groups)
    # A single draw, or copies of one, may be greedy answers, which have no new draws; groups are a sample of questions.
    # Both are judged on problems like these, as in a report.
    if share * test.pairs.shape[1] < GREEDY_BELOW or groups is not None:
        return replace(test, population="like_these")
    return test


def _to_decide(test: PairedTest, margin: float, shows_nothing: bool) -> str:
    """How many draws, problems or groups would show that a setting is safe, if it equals the baseline."""
    if test.population == "these":
        draws = test.draws_to_hold(margin)
        # As in a report: many draws of problems that are too few to show anything are no plan.
        if not shows_nothing or draws <= len(test.pairs):
            return f"{draws:,} draws"
    needed = test.problems_to_hold(margin)
    return f"{needed:,} {'problems' if test.groups is None else 'groups'}"


def _texts_that_differ(first: pd.DataFrame, second: pd.DataFrame) -> tuple[int, int]:
    """How many texts differ, and how many both have."""
    # pandas names the two columns of texts text_x and text_y.
    both = first.merge(second, on=PAIR).dropna(subset=["text_x", "text_y"])
    return (both["text_x"] != both["text_y"]).sum(), len(both)


def _refuse_no_pair(answers: Answers, *names: str) -> None:
    """Raise UserError that says why two settings have no graded pair: one without grades, or no common draw."""
    for name in names:
        if answers[name]["correct"].isna().all():
            raise UserError(
                f"{visible(name)} has no grade in any row: write 1 or 0, give --grades ours, or --ignore a column that "
                "says no failure."
            )
    raise UserError(f"{' and '.join(names)} share no graded pair of problem and draw: check ids and draws.")


# --- words ---------------------------------------------------------------------------------------------------


def _sentence(name: str, verdict: Verdict, control: str | None) -> str:
    """A verdict that can be pasted: label, both accuracies, difference, what it rests on, what would decide."""
    test = verdict.test
    size = f"{counted(test.pairs.shape[0], 'problem')} x {counted(test.pairs.shape[1], 'draw')}"
    if test.groups is not None:
        size = f"{len({*test.groups})} groups of {size}"
    change = f"{notation.percent(verdict.accuracy)}% -> {_accuracy(verdict)}"
    parts = [f"{visible(name)}: {verdict.label}. {change}, {_difference(verdict, ' points')} on {size}"]
    if test.population == "these":  # else the interval above is the one for new problems
        on_new = replace(test, population="like_these")
        low = on_new.lower_end(LEVEL)
        high = on_new.upper_end(LEVEL)
        parts.append(f"on new problems {notation.interval(low, high, signed=True)}")
    missing = np.isnan(test.pairs).all(axis=1).sum()
    if missing:
        parts.append(f"{missing} of {counted(len(test.pairs), 'problem')} have no graded pair")
    if verdict.shows_nothing:
        parts.append("this can show nothing")
    if verdict.to_decide:
        parts.append(f"{verdict.to_decide} would decide")
    if control is not None:
        differ, both = verdict.texts
        texts = f"{differ:,} of {both:,} texts differ" if both else "the control"
        if name != control:
            texts += _beside_control(verdict)
        parts.append(texts)
    return "; ".join(parts)


def _accuracy(verdict: Verdict) -> str:
    return f"{notation.percent(verdict.accuracy + verdict.decision.difference)}%"


def _difference(verdict: Verdict, unit: str = "") -> str:
    decision = verdict.decision
    interval = notation.interval(decision.low, decision.high, signed=True)
    return f"{notation.percent(decision.difference, signed=True)}{unit} ({interval})"


def _beside_control(verdict: Verdict) -> str:
    if verdict.beyond_control:
        return ", and surely more answers change than in the control"
    few = ", and no more answers surely change than in the control"
    if verdict.label == "worse":
        return f"{few}, but more are lost than won"
    return few


def _table(verdicts: Mapping[str, Verdict], sizes: Mapping[str, float]) -> pd.DataFrame:
    rows = list[Any]()
    complete = []  # place in the table, bytes and difference; a setting that lacks answers beats no other
    for name, verdict in verdicts.items():
        pairs = verdict.test.pairs
        row = {
            "setting": visible(name),
            "verdict": verdict.label,
            "accuracy": _accuracy(verdict),
            "difference": _difference(verdict),
            "lost/won": f"{(pairs < 0).sum():,}/{(pairs > 0).sum():,}",
            "to decide": verdict.to_decide,
        }
        if sizes:
            row["bytes"] = notation.number(sizes.get(name))
        if name in sizes and np.isfinite(pairs).all():
            complete.append((len(rows), sizes[name], verdict.decision.difference))
        rows.append(row)
    # Beside one baseline, differences rank the settings as Pass@1 would.
    candidates = pd.DataFrame(complete, columns=["place", "bytes", "pass_at_1"])
    for place in pareto_front(candidates, "bytes")["place"]:
        rows[place]["bytes"] += " (best)"
    return pd.DataFrame(rows)


def _notes_on_files(
    paths: Mapping[str, Sequence[Path]], outputs: Mapping[str, Outputs], reading: Reading
) -> Iterator[str]:
    """What a reader has to know of the files that were read."""
    if reading.graded:
        grades = dict.fromkeys(visible(str(setting.grade)) for setting in outputs.values())
        shares = [
            f"{notation.percent(setting.answers['correct'].mean())}% in {visible(name)}"
            for name, setting in outputs.items()
        ]
        yield f"the grade is {' and '.join(grades):.80}, right in {', '.join(shares)}."
    taken = [f"{len(setting.answers):,} of {setting.rows:,} of {visible(name)}" for name, setting in outputs.items()]
    for column, values in reading.where.items():
        values_taken = " or ".join(map(visible, values))
        yield f"rows with {visible(column)} {values_taken} count: {', '.join(taken)}."
    for name, sources in paths.items():
        if any(map(Path.is_dir, sources)):
            yield f"{name} is read from {' and '.join(map(str, outputs[name].files))}."


def _notes_on_answers(answers: Answers, baseline: str) -> Iterator[str]:
    """What a reader has to know of each setting's answers."""
    for name, table in answers.items():
        # An answer with neither a sign of failure nor a grade has "no grade" as its sign.
        has_either = table["sign"].notna() | table["correct"].notna()
        signs: Any = table["sign"].where(has_either, "no grade").value_counts()
        if len(signs):
            by_sign = ", ".join(f"{count:,} by {visible(sign):.60}" for sign, count in signs.items())
            yield (
                f"{name}: {counted(signs.sum(), 'answer')} of {len(table):,} are missing and not wrong, as no answer "
                f"is known: {by_sign}."
            )
        for reason, count in table["ending"][table["sign"].isna()].value_counts().items():
            share = f"{name}: {counted(count, 'answer')} of {len(table):,}"
            if reason == "length":
                yield f"{share} were cut off, at their longest or in their thinking."
            elif reason != "stop":
                yield (
                    f"{share} ended by {reason!r}, which is no known end or limit: the text alone says if it was cut "
                    "off."
                )
        if "theirs" in table:
            yield from _disagreements(name, table)
        yield from _errors_as_texts(name, table)
        yield from _unused(answers, name, baseline)
        yield from _unused(answers, baseline, name)


def _unused(answers: Answers, has: str, lacks: str) -> Iterator[str]:
    """What of the setting `has` is compared with nothing, because the setting `lacks` has no such draw or problem."""
    table = answers[has]
    unused = ~table["draw"].isin(answers[lacks]["draw"])
    if unused.any():
        yield f"{has}: {counted(unused.sum(), 'answer')} are unused, of draws that {lacks} lacks."
    problems = sorted({*table["problem_id"]} - {*answers[lacks]["problem_id"]})
    if problems:
        shown = ", ".join(repr(visible(problem)) for problem in problems[:_NAMED])
        total = counted(table["problem_id"].nunique(), "problem")
        yield f"{lacks} lacks {len(problems)} of the {total} of {has}: {shown}."


def _disagreements(name: str, table: pd.DataFrame) -> Iterator[str]:
    """How many of the file's own grades (`theirs`) are others than ours, and the first of them."""
    both = table.dropna(subset=["theirs", "correct"])
    differ: Any = both.query("theirs != correct")
    words = [
        f"{visible(row.problem_id)} draw {row.draw} (ours {'right' if row.correct else 'wrong'})"
        for row in differ.head(_NAMED).itertuples()
    ]
    if len(both):
        yield f"{name}: {len(differ)} of {len(both):,} grades differ from the file's own: {'; '.join(words) or 'none'}."


def _errors_as_texts(name: str, table: pd.DataFrame) -> Iterator[str]:
    """A program that catches its errors may write one text in place of many answers; it is right in none."""
    texts = table.groupby("text")
    never_right = texts["correct"].max() == 0
    problems: Any = texts["problem_id"].nunique()[never_right]
    total = table["problem_id"].nunique()
    # Two problems may have the same wrong text by chance; three seldom do, and of many problems more have to.
    for text, count in problems[problems >= max(3, _OFTEN * total)].items():
        yield (
            f"{name}: {visible(str(text))!r:.60} is the text of {count:,} of {total:,} problems and never right: if "
            "it says that a request failed, leave these rows out, so that they count as missing."
        )


def _notes_on_pairs(name: str, verdict: Verdict, baseline: str) -> Iterator[str]:
    """What a reader has to know of a setting's pairs with the baseline."""
    pairs = verdict.test.pairs
    missing = np.isnan(pairs).sum()
    if verdict.test.share < 1:
        draws = pairs.shape[1]
        these = f"{counted(draws, 'draw')} of a problem count as {notation.decimal(verdict.test.share * draws)}"
        yield (
            f"{name}: {these}: the same text, or no text that tells draws from copies, adds nothing (--ignore the text "
            "if it is the answer alone, or name it by --column text=NAME)."
        )
    if verdict.unused:
        yield f"{name}: {counted(verdict.unused, 'pair')} are unused, of draws that few problems have."
    if missing:
        yield (
            f"{name}: {missing:,} of {counted(pairs.size, 'pair')} with {baseline} have no grade: ask these again. "
            "Until then they count as lost in the lower end of the interval and as won in the upper one."
        )
    differ, both = verdict.texts
    if both and not differ:
        yield f"{name}: all {both:,} texts are those of {baseline}: check that the setting was on."
    # Half of the texts differ, or none is to be compared, and not a single grade differs.
    elif 2 * differ >= both and not np.nan_to_num(pairs).any():
        yield (
            f"{name}: all {counted(pairs.size - missing, 'grade')} are those of {baseline}: check that the column is "
            "the answer's grade and not the question's."
        )


def _in_words(verdicts: Mapping[str, Verdict], baseline: str, margin: float) -> Iterator[str]:
    """What the labels and numbers speak of, and what to do next."""
    points = counted(notation.number(margin), "point")
    full = visible(baseline)
    labels = {verdict.label for verdict in verdicts.values()}
    # Once in 40 is `LEVEL`.
    yield (
        f"Safe: very likely loses less than {points} of accuracy against {full}. A setting that truly loses {points} "
        "is called safe at most once in 40."
    )
    for label, text in _LEGEND.items():
        if label in labels:
            yield text
    yield f"Lost are the answers that are wrong where {full} is right in the same draw, won the other way around."
    if "like_these" in {verdict.test.population for verdict in verdicts.values()}:
        yield "A verdict on one draw, on copies or on groups is about problems like these: new draws say nothing."
    if labels & {"safe", "worse", "small loss", _BETTER}:
        yield "Problems are taken as independent: variants of one question need --group COLUMN."
