"""A completion to inspect: a stored one of a cell, a row of a file of texts, or one that the model writes now."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from kvsweep.analysis.notation import EQUATION, setting_of
from kvsweep.compression import artifacts
from kvsweep.compression.policy import BudgetPolicy
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.grading.grader import Grader, standard_of
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import read_spec
from kvsweep.harness.predictor.recipe import LabelKind
from kvsweep.harness.predictor.traces import Trace, check_cell, read_graded, trace_of, trace_of_text
from kvsweep.harness.settings import build, compose_config, plain_config_errors
from kvsweep.harness.sweep.checks import check_artifacts, check_tags, other_model
from kvsweep.harness.sweep.grid import build_policies
from kvsweep.harness.sweep.job import make_job, stored_config
from kvsweep.messages.errors import UserError
from kvsweep.run_files.other_rows import texts_of_file
from kvsweep.run_files.row_types import CELL_FILE, PROVENANCE_FILE, Completion, Grade, Problem
from kvsweep.run_files.run_reader import StoredCell

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel


class NotInText(UserError):
    """This completion lacks what is asked for; another completion may have it."""


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of `kvsweep trace`; its help describes each."""

    source: str
    overrides: Sequence[str]
    problem: str | None
    draw: int
    question: str | None
    show: str
    label: Sequence[LabelKind]
    head: Sequence[Path]
    scores: Sequence[str]
    by: str
    split: str | None
    steps: str | None
    find: str | None
    map: str | None
    out: Path


@dataclass(frozen=True, kw_only=True)
class InspectedText:
    """One completion and its model. `completion` is None for a text from a file; `setting` describes its policy."""

    model: LoadedModel
    trace: Trace
    completion: Completion | None = None
    setting: str = ""
    grade: Grade | None = None

    @property
    def title(self) -> str:
        """The pictures' title in two lines: model, problem and draw; policy, setting and outcome."""
        written = ", ".join(part for part in (self.setting, self.outcome) if part)
        return f"{self.model.config.title}: {self.trace.problem_id}, draw {self.trace.draw}\n{written}".strip()

    @property
    def outcome(self) -> str:
        """The outcome in words, such as "correct" or "no answer"; empty without a grade or a reference answer."""
        return self.grade.outcome.replace("_", " ") if self.grade and self.grade.gold else ""

    @property
    def summary(self) -> str:
        """The completion as written, then answer, outcome, length and evictions; not for a text from a file."""
        completion, grade = self.completion, self.grade
        assert completion is not None
        answer = grade.answer if grade else None
        gold = f" for {grade.gold}: {self.outcome}" if grade and self.outcome else ""
        size = f"{completion.num_tokens} tokens ({completion.stop_reason}), {len(completion.evictions)} evictions"
        return f"{completion.text}\n\nanswer {answer or 'none'}{gold}; {size}"

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token. A character of several tokens belongs to the last; the others are empty."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.model.tokenizer.backend_tokenizer, token) or "" for token in self.trace.token_ids]

    @property
    def thinking(self) -> list[str]:
        return self.pieces[self.trace.think_start : self.trace.think_end]


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A completion that was found and checked before its model is loaded. `read` makes it with the loaded model."""

    model: ModelConfig
    config: DictConfig
    read: Callable[[LoadedModel], InspectedText]

    @plain_config_errors()
    def policies(self, names: Sequence[str]) -> list[BudgetPolicy]:
        """Return policies by name, with shared settings; refuses unknown, scoreless, and other models' policies."""
        if not names:
            return []
        values: Any = OmegaConf.to_container(self.config)
        policies = build_policies(DictConfig({**values, "grid": {"policy": list(names)}}))
        check_tags(self.model, policies)
        check_artifacts(self.model, read_spec(self.model), policies)
        scoring = []
        for policy in policies:
            if not isinstance(policy, BudgetPolicy):
                raise UserError(f"--scores {policy.name} cannot be drawn: it keeps everything and scores nothing.")
            scoring.append(policy)
        return scoring

    def check_head(self, path: Path) -> None:
        """Refuse a predictor that is missing or was made for another model."""
        artifacts.check("predictor", str(path), "kvsweep predictor train")
        other = other_model(artifacts.read_card("predictor", path), self.model, read_spec(self.model))
        if other:
            raise UserError(f"--head {path} was made for {other}: name another head.")


@plain_config_errors()
def of_cell(folder: Path, problem_id: str | None, draw: int, overrides: Sequence[str] = ()) -> TextSource:
    """Return a cell's stored completion. Overrides of model and policy say where the cell's files lie now.

    Raises UserError for a folder without this completion, an override of anything else, and other weights.
    """
    if not (folder / CELL_FILE).is_file():
        raise UserError(f"{folder} is no cell's folder: name one of a run, as `kvsweep status RUN --cells` shows them.")
    for override in overrides:
        if not override.startswith(("model.", "policy.")):
            raise UserError(
                f"{override} cannot be given with a cell's folder, because the cell has its own settings: give only "
                "where files lie now, as in model.path=DIR model.predictor=DIR policy.predictor=DIR."
            )
    stored = list(read_graded(folder))  # question, completion and grade
    matching = []
    answered = []
    for row in stored:
        _, completion, grade = row
        if problem_id in (None, completion.problem_id) and completion.draw == draw:
            matching.append(row)
            if grade is not None and grade.answer is not None:
                answered.append(row)
    if not matching:
        pairs = sorted(f"{completion.problem_id}/{completion.draw}" for _, completion, _ in stored)
        raise UserError(
            f"--problem {problem_id} --draw {draw} is not among the completions of {folder}: "
            f"it has {', '.join(pairs[:5]) or 'none'} ..."
        )
    # Most pictures need an answer.
    question, completion, grade = answered[0] if answered else matching[0]
    source = of_completion(folder, question, completion, overrides, grade)
    check_cell(folder, source.model)
    return source


def of_completion(
    folder: Path, question: str, completion: Completion, overrides: Sequence[str] = (), grade: Grade | None = None
) -> TextSource:
    """Return a cell's completion, with the run's configuration and the size of the cell's policy."""
    cell = StoredCell(folder)
    files = cell.files(PROVENANCE_FILE)  # a cell of several shards has only theirs, each with the configuration
    # Without any file the missing one is named, and refused.
    config_of_run = stored_config(next(iter(files.values()), folder / PROVENANCE_FILE))
    policy_of_cell = cell.settings["policy"]
    policy = config_of_run["policy"]
    for name in BudgetPolicy.SHARED:
        if name in policy_of_cell and name in policy:
            policy[name] = policy_of_cell[name]
    # The cell's keep_ratio and budget, just taken over, say what `rows` and `every` say, and both may not be given.
    if "rows" in policy:
        policy.update(rows=None, every=None)
    sections = {"model": config_of_run["model"], "policy": policy}
    config = DictConfig(OmegaConf.merge(sections, OmegaConf.from_dotlist(list(overrides))))
    setting = setting_of(policy_of_cell)

    def read(loaded: LoadedModel) -> InspectedText:
        trace = trace_of(completion, loaded, loaded.dialogue.prompt_ids(question))
        return InspectedText(model=loaded, trace=trace, completion=completion, setting=setting, grade=grade)

    return TextSource(model=build(ModelConfig, "model", config.model), config=config, read=read)


@plain_config_errors()
def of_file(path: Path, problem_id: str | None, draw: int, overrides: Sequence[str] = ()) -> TextSource:
    """Return a row of a file of texts, with the overrides' model. A row has problem and text, perhaps id and draw.

    Raises UserError if the row or a field is missing; `read` raises UserError for a text that does not answer.
    """
    for text in texts_of_file(path):
        where, row = text
        if problem_id in (None, row.id) and (row.draw or 0) == draw:
            break
    else:
        raise UserError(
            f"--problem {problem_id} --draw {draw} is not in {path}: name the id of a row, or its line number."
        )

    def read(loaded: LoadedModel) -> InspectedText:
        trace, _ = trace_of_text(row.problem, row.text, (row.id, draw), loaded.config.tags, loaded, where)
        return InspectedText(model=loaded, trace=trace)

    config = compose_config(*overrides)
    return TextSource(model=build(ModelConfig, "model", config.model), config=config, read=read)


@plain_config_errors()
def live(overrides: Sequence[str], problem_id: str | None, draw: int, question: str | None = None) -> TextSource:
    """Return the completion that `read` will write as a cell would; refuses several cells, or an unknown problem."""
    config = compose_config(*overrides)
    job = make_job(config)
    if len(job.cells) > 1:
        raise UserError(f"the grid has {len(job.cells)} cells and live writes one completion: leave out grid.*.")
    if question is not None:
        matching = [Problem(id=problem_id or "question", prompt=question, gold="")]
    else:
        matching = [problem for problem in job.benchmark.problems if problem_id in (None, problem.id)]
    if not matching:
        some = ", ".join(job.problem_ids[:5])
        raise UserError(f"--problem {problem_id} is not in {job.benchmark.name}: it has {some} ...")
    problem = matching[0]
    [cell] = job.cells

    def read(loaded: LoadedModel) -> InspectedText:
        """Let the model write and grade the completion."""
        from kvsweep.harness.sweep.fill import engine_of

        prompt = loaded.dialogue.prompt_ids(problem.prompt)
        branch = Branch(cell_id="", policy=cell.policy)
        request = Request(problem_id=problem.id, draw=draw, prompt_ids=prompt, branches=(branch,))
        [(_, completion)] = engine_of(job, [request], loaded, slots=1).generate([request])
        with Grader(workers=1) as grader:
            [grade] = grader.grade([completion], standard_of(cell.describe(), {problem.id: problem.gold}))
        trace = trace_of(completion, loaded, prompt)
        setting = setting_of(cell.policy.identity())
        return InspectedText(model=loaded, trace=trace, completion=completion, setting=setting, grade=grade)

    return TextSource(model=job.model, config=config, read=read)


PARAGRAPHS = r"\n\s*\n"
SENTENCES = r"(?<=[.!?])\s+|\n+"


def paragraphs(pieces: Sequence[str], split: str = PARAGRAPHS) -> list[range]:
    """Tokens of each step. A step begins with the first token that lies completely behind a match of `split`."""
    return _parts(pieces, [match.end() for match in _pattern("--split", split).finditer("".join(pieces))])


def derivations(pieces: Sequence[str], split: str = PARAGRAPHS) -> list[range]:
    """Tokens of each step that derives a number: a sentence with an equation, and the sentences that continue it.

    A sentence continues an equation if it has a number, no equation, and no paragraph begins there, as in `1+8=9. So c
    is 9.` A text without any equation is cut into paragraphs, or into sentences if it is one paragraph.
    """
    text = "".join(pieces)
    cuts = [0, *(match.end() for match in re.finditer(SENTENCES, text)), len(text)]
    paragraph_ends = [match.end() for match in _pattern("--split", split).finditer(text)]
    steps = []  # first character of each, and the one behind its last
    goes_on = False
    for begin, end in pairwise(cuts):
        sentence = text[begin:end]
        if re.search(EQUATION, sentence):
            steps.append([begin, end])
            goes_on = True
            continue
        goes_on = goes_on and bool(re.search(r"\d", sentence)) and begin not in paragraph_ends
        if goes_on:
            steps[-1][1] = end
    if not steps:
        return _parts(pieces, paragraph_ends or cuts)  # the cuts between sentences, if there is one paragraph
    return [token_range(pieces, begin, end) for begin, end in steps]


def _parts(pieces: Sequence[str], ends: Sequence[int]) -> list[range]:
    """Cut the tokens at characters of the text; a part begins with the first token completely behind the cut."""
    begins = list(accumulate(map(len, pieces), initial=0))  # the first character of each token, and the text's end
    first_tokens = np.searchsorted(begins, ends).tolist()
    return [range(begin, end) for begin, end in pairwise(sorted({0, *first_tokens, len(pieces)}))]


def matches(pieces: Sequence[str], pattern: str = EQUATION) -> list[range]:
    """Tokens of each match of a pattern that is not empty."""
    text = "".join(pieces)
    return [token_range(pieces, *match.span()) for match in _pattern("--find", pattern).finditer(text) if match.group()]


def read_steps(text: str) -> list[range]:
    """Read `0-31,40-80`, first and last tokens of thinking steps; disorder or overlap raises UserError."""
    steps = []
    bounds = []
    for first, last in re.findall(r"(\d+)-(\d+)", text):
        step = range(int(first), int(last) + 1)
        steps.append(step)
        bounds += [step.start, step.stop]
    is_list = re.fullmatch(r"\s*\d+-\d+\s*(,\s*\d+-\d+\s*)*", text)
    if not is_list or not all(steps) or bounds != sorted(bounds):
        raise UserError(f"--steps {text} cannot be used: write first and last tokens in order, as in 0-31,40-80.")
    return steps


def step_numbers(steps: Sequence[range], tokens: int) -> list[int]:
    """Return the number of each token's step, ascending from 0. Tokens between two steps count as a step too."""
    bounds = []
    for step in steps:
        bounds += [step.start, step.stop]
    begins_step = np.isin(np.arange(tokens), bounds)  # of each token
    return [0, *np.cumsum(begins_step[1:]).tolist()]  # the first token begins step 0


def token_range(pieces: Sequence[str], begin: int, end: int) -> range:
    """Return the tokens that hold any character from `begin` up to `end` of the joined pieces."""
    ends = list(accumulate(map(len, pieces)))  # the character behind each token
    # From the first token that ends behind `begin` to the first that ends at `end` or behind it.
    return range(bisect_right(ends, begin), bisect_left(ends, end) + 1)


def _pattern(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{option} {pattern} is no regular expression ({error}): correct it.") from error
