"""Stage 1: correct traces that close their thinking, written by the model here or taken from stored completions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace
from tqdm import tqdm

from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.benchmarks.load import load_problems, question_hash
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.grading.answers import AnswerKind, Rule, Ungraded, canonical_gold
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.predictor.recipe import PredictorSettings, read_manifest
from kvsweep.harness.toy.tasks import KINDS, training_problems
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.other_rows import TextRow, texts_of_file
from kvsweep.run_files.row_types import Completion, Grade, Problem, read_rows
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import replace_text
from kvsweep.run_files.thinking import ThinkTags, segment_text

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel

TRACES_FILE, ORIGIN_FILE, QUESTIONS_FILE = "traces.jsonl", "traces.json", "questions.json"


class Trace(row_types.PairRow, frozen=True, kw_only=True):
    """A reasoning trace as token ids: question, thinking, closing tag, answer."""

    sealed: ClassVar[bool] = False  # a trace belongs to no cell
    kept: bool  # False for a completion without labels; its token ids are not stored
    token_ids: list[int]  # all tokens, without the stop token, which is never fed
    think_start: int  # position of the first thinking token: the length of the question
    think_end: int  # position of the closing tag; the end of the text if the thinking is never closed
    tag_tokens: int = 1  # tokens of the closing tag

    @property
    def question_ids(self) -> list[int]:  # none where token ids are not stored
        return self.token_ids[: self.think_start]

    @property
    def answer_start(self) -> int:
        return self.think_end + self.tag_tokens

    @property
    def answered(self) -> bool:
        return self.answer_start < len(self.token_ids)


Questions = Mapping[row_types.Pair, list[int]]  # the token ids of each stored trace's question


def make_traces(settings: PredictorSettings) -> dict[str, int]:
    """Append the missing traces to traces.jsonl; return how many are kept. The model is loaded after the problems."""
    path = settings.recipe.out / TRACES_FILE
    origin = json.dumps(_origin(settings), indent=2) + "\n"
    manifest = path.with_name(ORIGIN_FILE)
    stored_questions = {trace.key: trace.question_ids for trace in read_rows(path, Trace)}
    has_same_origin = manifest.is_file() and manifest.read_bytes() == origin.encode()
    if stored_questions and not has_same_origin:
        raise UserError(
            f"{path} holds traces of another model, seed, decoding or recipe.import_from, or does not name them: "
            "delete it or set recipe.out=."
        )
    traces = imported_traces(settings) if settings.recipe.import_from else written_traces(settings, stored_questions)
    for trace in traces:
        if not is_stored(stored_questions, trace.key, trace.question_ids):
            # Before a trace, so that none is stored without its origin, and no origin without a trace.
            replace_text(manifest, origin)
            row_types.append_row(path, trace)
    return {"kept": len(read_traces(settings))}


def add_questions(folder: Path, questions: Iterable[str]) -> None:
    """Add the questions' hashes to those that the folder's traces answer."""
    hashes = {*read_questions(folder), *(question_hash(question) for question in questions)}
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / QUESTIONS_FILE, json.dumps(sorted(hashes)) + "\n")


def read_questions(folder: Path) -> list[str]:
    """Return the hashes of the questions of the folder's traces; none for traces of an earlier version."""
    file = folder / QUESTIONS_FILE
    return list(json.loads(file.read_text())) if file.exists() else []


def is_stored(stored_questions: Questions, key: row_types.Pair, question_ids: list[int]) -> bool:
    """True if the pair is stored; raises UserError if that trace answers another question of the same id."""
    if key not in stored_questions:
        return False
    stored_ids = stored_questions[key]
    if stored_ids and question_ids and stored_ids != question_ids:
        raise UserError(
            f"{TRACES_FILE} holds another question of the id {key[0]!r:.60}: "
            "delete it, set recipe.out=, or give the problems ids of their own."
        )
    return True


def _origin(settings: PredictorSettings) -> dict[str, Any]:
    """Return what decides the traces, except the problems, because their number may grow."""
    recipe = settings.recipe
    model = settings.model.identity()
    if recipe.import_from:
        return {"model": model, "import_from": str(Path(recipe.import_from).absolute())}
    return {"model": model, "decoding": asdict(settings.decoding), "seed": recipe.seed}


def read_traces(settings: PredictorSettings) -> list[Trace]:
    """Return the model's kept traces, by problem and draw; raises UserError if there are none or another model's."""
    file = settings.recipe.out / TRACES_FILE
    kept = sorted((trace for trace in read_rows(file, Trace) if trace.kept), key=lambda trace: trace.key)
    if not kept:
        raise UserError(f"{file} holds no correct trace: run kvsweep predictor traces, on more problems.")
    read_manifest(settings, file.with_name(ORIGIN_FILE), "traces")  # only to refuse another model's
    return kept


def written_traces(settings: PredictorSettings, stored_questions: Questions) -> Iterator[Trace]:
    """Let the model write the traces that are missing, with its full cache, and grade them."""
    problems, questions, kind = trace_problems(settings)
    model = settings.loaded
    recipe = settings.recipe
    add_questions(recipe.out, questions)
    branches = (Branch(cell_id="", policy=FullCache(name="full")),)
    prompts = {problem.id: model.dialogue.prompt_ids(problem.prompt) for problem in problems}
    golds = {problem.id: problem.gold for problem in problems}
    requests = []
    for name, prompt in prompts.items():
        question = list(prompt)
        for draw in range(recipe.draws):
            if not is_stored(stored_questions, (name, draw), question):
                requests.append(Request(problem_id=name, draw=draw, prompt_ids=prompt, branches=branches))
    if not requests:
        return
    from kvsweep.harness.decode.engine import Engine

    engine = Engine.sized_for(
        requests, model, decoding=settings.decoding, seed=recipe.seed, slots=recipe.slots, impl=recipe.impl
    )
    with Grader(workers=1) as grader:
        for _, completion in tqdm(engine.generate(requests), total=len(requests), desc="traces"):
            name = completion.problem_id
            rule = Rule(tags=model.config.tags)
            [verdict] = grader.judge([Ungraded(completion.text, completion.stop_reason, golds[name], kind, rule=rule)])
            yield graded_trace(completion, model, prompts[name], verdict.outcome == "correct")


def trace_of(completion: Completion, model: LoadedModel, prompt: Sequence[int]) -> Trace:
    """Return a completion's trace, behind the token ids of its prompt."""
    ids = completion.token_ids[:-1] if completion.stop_reason == "stop" else completion.token_ids
    return _trace(completion.key, ids, model, prompt)


def _trace(key: row_types.Pair, ids: list[int], model: LoadedModel, prompt: Sequence[int]) -> Trace:
    """Return the trace of a completion's tokens: where it thinks, and where it closes its thinking."""
    # Without a closing tag, the thinking ends with the text, and the tag that is missing would follow.
    closing = model.dialogue.closing_tag(ids) or range(len(ids), len(ids) + 1)
    problem_id, draw = key
    return Trace(
        problem_id=problem_id,
        draw=draw,
        kept=True,
        token_ids=[*prompt, *ids],
        think_start=len(prompt),
        think_end=len(prompt) + closing.start,
        tag_tokens=len(closing),
    )


def graded_trace(completion: Completion, model: LoadedModel, prompt: Sequence[int], correct: bool) -> Trace:
    """Return a completion's trace, kept if it is correct, thinks, answers, and evicted nothing."""
    trace = trace_of(completion, model, prompt)
    thinks = trace.think_end - trace.think_start > 1  # a single token, such as a line break, says nothing
    if correct and thinks and trace.answered and not completion.evictions:
        return trace
    # Of a trace that is not kept, the length of its thinking is stored: 0 if it is never closed.
    is_closed = trace.think_end < len(trace.token_ids)
    think_end = trace.think_end if is_closed else trace.think_start
    return replace(trace, kept=False, token_ids=[], think_end=think_end)


def read_graded(folder: Path) -> Iterator[tuple[str, Completion, Grade | None]]:
    """Yield question, completion and grade of each pair of a cell, from the pair's last rows."""
    cell = StoredCell(folder)
    problems, grades = cell.problems(), cell.grades()
    for completion in cell.rows(Completion):
        name = completion.problem_id
        if name not in problems:
            raise UserError(
                f"{folder} holds a completion of problem {name!r} and no such problem: "
                f"restore its {row_types.PROBLEMS_FILE}, or run the cell again."
            )
        yield problems[name].prompt, completion, grades.get(completion.key)


def trace_problems(settings: PredictorSettings) -> tuple[list[Problem], list[str], AnswerKind]:
    """Return the traces' problems, their questions, and their kind of answer. No toy problem is evaluated elsewhere."""
    recipe = settings.recipe
    if recipe.toy_problems is None:
        if settings.benchmark is None:
            raise UserError(
                "no problems for traces: give recipe.toy_problems=, or recipe=r1 with benchmark= or benchmark.path=."
            )
        benchmark = load_problems(settings.benchmark)
        return list(benchmark.problems), list(benchmark.questions), settings.benchmark.answer_kind
    problems = []
    for task in recipe.toy_tasks:
        rng = Random(f"kvsweep-toy-traces-{recipe.seed}-{task}")
        stream = training_problems(task, rng, KINDS[task].eval_sizes)
        for toy in islice(stream, recipe.toy_problems // len(recipe.toy_tasks)):
            problems.append(Problem(id=toy.id, prompt=toy.question, gold=str(toy.answer)))
    return problems, [problem.prompt for problem in problems], "integer"


def imported_traces(settings: PredictorSettings) -> Iterator[Trace]:
    """Return traces of a cell's folder or of a file of problem, text, and gold or correct; UserError without them."""
    source = Path(str(settings.recipe.import_from))
    if (source / row_types.CELL_FILE).is_file():
        return _imported_cell(source, settings)
    if source.is_file():
        return _imported_texts(source, settings)
    raise UserError(
        f"recipe.import_from={source} does not exist, or has no {row_types.CELL_FILE}: "
        "give a cell's folder or a file of texts."
    )


def _imported_cell(folder: Path, settings: PredictorSettings) -> Iterator[Trace]:
    """Yield a trace of each graded completion of a cell."""
    check_cell(folder, settings.model)
    model = settings.loaded
    add_questions(settings.recipe.out, [problem.prompt for problem in StoredCell(folder).problems().values()])
    for question, completion, grade in read_graded(folder):
        if grade is not None:
            yield graded_trace(completion, model, model.dialogue.prompt_ids(question), grade.correct == 1)


def _imported_texts(source: Path, settings: PredictorSettings) -> Iterator[Trace]:
    """Yield a trace of each text that thinks and answers; a note names each other one."""
    tags = ThinkTags(start=settings.recipe.open_tag, end=settings.recipe.close_tag)
    texts = _rows_by_pair(source)
    model = settings.loaded
    add_questions(settings.recipe.out, [row.problem for _, row in texts.values()])
    with Grader(workers=1) as grader:
        for key, (where, row) in texts.items():
            try:
                trace, answer = trace_of_text(row.problem, row.text, key, tags, model, where)
            except UserError as error:
                tqdm.write(f"left out: {error}")
                continue
            if row.correct is not None:
                yield replace(trace, kept=bool(row.correct))
                continue
            gold = str(row.gold)
            # A file names no kind of answer.
            kind: AnswerKind = "expression" if canonical_gold(gold, "integer") is None else "integer"
            [verdict] = grader.judge([Ungraded(answer, "stop", gold, kind, rule=Rule(answer_from="whole_text"))])
            yield replace(trace, kept=verdict.outcome == "correct")


def check_cell(folder: Path, model: ModelConfig) -> None:
    """Refuse the cell of another model, or of a server (a server's cell names no weights)."""
    if StoredCell(folder).settings["model"].get("weights") != model.identity()["weights"]:
        raise UserError(
            f"{model.place} holds other weights than {folder} was run with, or none: "
            "name the folder of its own with model.path=DIR."
        )


def _rows_by_pair(source: Path) -> dict[row_types.Pair, tuple[str, TextRow]]:
    """Return the rows of a file of texts by problem and draw, each with its place, as messages name it.

    Rows of one question share the first one's id, to be held out together.
    """
    ids = {}  # of the first row of each question
    counts = Counter[str]()  # of the rows with an id: the draw of the next, if it names none
    rows = {}
    for where, row in texts_of_file(source):
        if row.gold is None and row.correct is None:
            raise UserError(f"{where} must name problem, text, and gold or correct.")
        if row.problem not in ids:
            ids[row.problem] = row.id
        name = ids[row.problem]
        draw = counts[name] if row.draw is None else row.draw
        if (name, draw) in rows:
            raise UserError(
                f"{where} is the second row of problem {name!r} and draw {draw}: "
                "give the texts of one question different draws, or leave draw out."
            )
        counts[name] += 1
        rows[name, draw] = where, row
    return rows


def trace_of_text(
    question: str, text: str, key: row_types.Pair, tags: ThinkTags, model: LoadedModel, where: str
) -> tuple[Trace, str]:
    """Return a trace of a text behind its question in the chat template, with the model's tags, and its answer.

    Raises UserError, which calls the text `where`, unless it thinks, closes its thinking and answers.
    """
    thinking_slice, answer_slice = segment_text(text, tags, name=where)
    answer = text[answer_slice]
    prompt = model.dialogue.prompt_ids(question)
    completion = f"{text[thinking_slice]}{model.config.think_end}{answer}"
    return _trace(key, list(model.dialogue.completion_ids(completion)), model, prompt), answer
