"""Stage 1: correct traces of a model that close their thinking, written here or taken from stored texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace
from tqdm import tqdm

from kvsweep import records
from kvsweep.compression.policies.baselines import FullCache
from kvsweep.errors import UserError
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.grading.answers import AnswerKind, Job, canonical_gold
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.models.config import ThinkTags, segment_text
from kvsweep.harness.predictor.recipe import PredictorSettings
from kvsweep.harness.toy import tasks, words
from kvsweep.records import Completion, Grade, Problem, read_rows, read_shards

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel

TRACES_FILE = "traces.jsonl"


class Trace(records.PairRow, frozen=True, kw_only=True):
    """A reasoning text as token ids: the question, the thinking, its closing tag, the answer."""

    sealed: ClassVar[bool] = False  # traces belong to no cell
    kept: bool  # False for a text that gives no labels; its token ids are not stored
    token_ids: list[int]  # the whole text, without its stop token, which is never fed
    think_start: int  # position of the first thinking token, which is the length of the question
    think_end: int  # position of the closing tag; the end of the text where the thinking is never closed
    tag_tokens: int = 1  # tokens of the closing tag

    @property
    def answer_start(self) -> int:
        return self.think_end + self.tag_tokens

    @property
    def answered(self) -> bool:
        return self.answer_start < len(self.token_ids)


def make_traces(settings: PredictorSettings, load: Callable[[], LoadedModel]) -> int:
    """Append the missing traces to traces.jsonl; return how many are kept. The model is loaded after the problems."""
    path = settings.recipe.out / TRACES_FILE
    done = {trace.key for trace in read_rows(path, Trace)}
    found = imported(settings, load) if settings.recipe.import_from else written(settings, load, done)
    for trace in found:
        if trace.key not in done:
            records.append_row(path, trace)
    return len(read_traces(settings.recipe.out))


def read_traces(directory: Path) -> list[Trace]:
    """The kept traces of a directory, in the order of problem and draw; raises a UserError where there is none."""
    file = directory / TRACES_FILE
    kept = sorted((trace for trace in read_rows(file, Trace) if trace.kept), key=lambda trace: trace.key)
    if not kept:
        raise UserError(f"{file} holds no correct trace: run kvsweep predictor traces, on more problems.")
    return kept


def written(settings: PredictorSettings, load: Callable[[], LoadedModel], done: set[records.Pair]) -> Iterator[Trace]:
    """Let the model write the traces that are not done, with its full cache, and grade them."""
    problems, kind = trace_problems(settings)
    model, recipe = load(), settings.recipe
    branch = (Branch(cell_id="", policy=FullCache(name="full")),)
    asked = {p.id: (model.prompt_ids(p.prompt), p.gold) for p in problems}
    requests = [
        Request(problem_id=name, draw=draw, prompt_ids=prompt, branches=branch)
        for name, (prompt, _) in asked.items()
        for draw in range(recipe.draws)
        if (name, draw) not in done
    ]
    if not requests:
        return
    from kvsweep.harness.decode.engine import Engine

    engine = Engine.sized_for(
        requests, model, decoding=settings.decoding, seed=recipe.seed, slots=recipe.slots, impl=recipe.impl
    )
    with Grader(workers=1) as grader:
        for _, completion in tqdm(engine.generate(requests), total=len(requests), desc="traces"):
            prompt, gold = asked[completion.problem_id]
            row = Job(text=completion.text, stop_reason=completion.stop_reason, gold=gold, kind=kind)
            [verdict] = grader.judge([row])
            yield graded_trace(completion, model, prompt, verdict.outcome == "correct")


def trace_of(completion: Completion, model: LoadedModel, prompt: Sequence[int]) -> Trace:
    (name, draw), start = completion.key, len(prompt)
    ids = completion.token_ids[:-1] if completion.stop_reason == "stop" else completion.token_ids
    assert completion.thinking_tokens is not None
    thinking = min(completion.thinking_tokens, len(ids))
    where = {"think_start": start, "think_end": start + thinking, "tag_tokens": model.tag_tokens(ids, thinking)}
    return Trace(problem_id=name, draw=draw, kept=True, token_ids=[*prompt, *ids], **where)


def graded_trace(completion: Completion, model: LoadedModel, prompt: Sequence[int], correct: bool) -> Trace:
    """The trace of a completion. It is kept if the completion is correct, thinks, answers, and evicted nothing."""
    trace = trace_of(completion, model, prompt)
    if correct and trace.answered and trace.think_end - trace.think_start > 1 and not completion.evictions:
        return trace
    closed = trace.think_end < len(trace.token_ids)
    return replace(trace, kept=False, token_ids=[], think_end=trace.think_end if closed else trace.think_start)


def read_graded(folder: Path) -> Iterator[tuple[str, Completion, Grade | None]]:
    """Yield the question, completion and grade of each pair of a cell, from the pair's last rows."""
    questions = {problem.id: problem.prompt for problem in read_rows(folder / records.PROBLEMS_FILE, Problem)}
    grades = {grade.key: grade for grade in records.read_grades(folder)}
    for completion in read_shards(folder, records.COMPLETIONS_FILE, Completion):
        if (name := completion.problem_id) not in questions:
            mend = f"restore its {records.PROBLEMS_FILE}, or run the cell again"
            raise UserError(f"{folder} holds a completion of problem {name!r} and no such problem: {mend}.")
        yield questions[name], completion, grades.get(completion.key)


def trace_problems(settings: PredictorSettings) -> tuple[list[Problem], AnswerKind]:
    """The problems to write traces on, and their kind of answer. A toy problem among them belongs to no evaluation."""
    recipe = settings.recipe
    if recipe.toy_problems is None:
        if settings.benchmark is None:
            raise UserError("no problems for traces: set benchmark.path=, benchmark= or recipe.toy_problems=.")
        return list(load_problems(settings.benchmark).problems), settings.benchmark.answer_kind
    problems = []
    for task in recipe.toy_tasks:
        rng = Random(f"kvsweep-toy-traces-{recipe.seed}-{task}")
        if task in words.KINDS:
            stream = words.training_problems(task, rng)
        else:
            stream = tasks.training_problems(task, rng, tasks.TASKS[task].eval_sizes)
        toys = [next(stream) for _ in range(recipe.toy_problems // len(recipe.toy_tasks))]
        problems += [Problem(id=t.id, prompt=t.question, gold=str(t.answer)) for t in toys]
    return problems, "integer"


def imported(settings: PredictorSettings, load: Callable[[], LoadedModel]) -> Iterator[Trace]:
    """Traces from a cell's folder, or a JSONL of problem, text, and gold or correct; a lack raises a UserError."""
    source = Path(str(settings.recipe.import_from))
    if not source.exists():
        raise UserError(f"recipe.import_from={source} does not exist: give a cell's folder or a JSONL of texts.")
    model = load()
    if source.is_dir():
        for question, completion, grade in read_graded(source):
            if grade is not None:
                yield graded_trace(completion, model, model.prompt_ids(question), grade.correct == 1)
        return
    tags = ThinkTags(start=settings.recipe.open_tag, end=settings.recipe.close_tag)
    with Grader(workers=1) as grader:
        for number, row in enumerate(read_rows(source), start=1):
            where = f"{source}:{number}"
            if not {"problem", "text"} <= row.keys() or not {"gold", "correct"} & row.keys():
                raise UserError(f"{where} must name problem, text, and gold or correct.")
            try:
                trace, answer = trace_of_text(row, str(row.get("id", number)), tags, model, where)
            except UserError as error:
                tqdm.write(f"left out: {error}")
                continue
            if "correct" in row:
                yield replace(trace, kept=bool(row["correct"]))
            else:
                gold = str(row["gold"])
                kind: AnswerKind = "expression" if canonical_gold(gold, "integer") is None else "integer"
                text = Job(text=f"</think>{answer}", stop_reason="stop", gold=gold, kind=kind)
                [verdict] = grader.judge([text])
                yield replace(trace, kept=verdict.outcome == "correct")


def trace_of_text(row: dict[str, Any], name: str, tags: ThinkTags, model: LoadedModel, where: str) -> tuple[Trace, str]:
    """A row's text behind its question in the chat template, with the model's own tags; and the text's answer.

    A text that does not think, close its thinking and answer raises a UserError, which calls the row `where`.
    """
    text = row["text"]
    thinking, answer = (text[part] for part in segment_text(text, tags, name=where))
    prompt, draw = model.prompt_ids(row["problem"]), int(row.get("draw", 0))
    thought, said = (list(model.encode(part)) for part in (thinking, answer))
    ids, start = [*prompt, *thought, *model.think_end_ids, *said], len(prompt)
    where_it_thinks = {"think_start": start, "think_end": start + len(thought), "tag_tokens": len(model.think_end_ids)}
    return Trace(problem_id=name, draw=draw, kept=True, token_ids=ids, **where_it_thinks), answer
