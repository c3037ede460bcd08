"""Stage 1: correct, closed traces of a model, written by it here or taken from stored texts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from tqdm import tqdm

from analysis.records import (
    COMPLETIONS_FILE,
    GRADES_FILE,
    PROBLEMS_FILE,
    Completion,
    PairRow,
    Problem,
    UserError,
    drop_torn_line,
    read_rows,
    read_shards,
)
from compression.policies.full import FullCache
from harness.benchmarks.load import load_problems
from harness.decode.engine import Engine
from harness.decode.request import Branch, Request
from harness.grading.answers import AnswerKind, judge
from harness.models.load import LoadedModel
from harness.models.thinking import ThinkTags, segment_text
from harness.predictor.recipe import Plan
from harness.toy.tasks import TASKS, training_problems

TRACES_FILE = "traces.jsonl"


class Trace(PairRow, frozen=True, kw_only=True):
    """One correct text: question, thinking, closing tag at `think_end`, answer. `kept` is false for a useless one."""

    kept: bool
    token_ids: list[int]
    think_start: int
    think_end: int


def make_traces(plan: Plan, load: Callable[[], LoadedModel]) -> int:
    """Append to traces.jsonl what it lacks; return how many traces are kept. The model is loaded after the problems."""
    path = plan.recipe.directory / TRACES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_torn_line(path)
    done = {(row["problem_id"], row["draw"]) for row in read_rows(path)}
    source = imported(plan, load()) if plan.recipe.import_from else written(plan, load, done)
    with path.open("a") as file:
        for trace in source:
            if (trace.problem_id, trace.draw) not in done:
                file.write(trace.to_line())
                file.flush()
    return len(read_traces(plan.recipe.directory))


def read_traces(directory: Path) -> list[Trace]:
    """The kept traces of a directory, in an order that does not depend on when they were written.

    Raises:
        UserError: there are none.
    """
    rows = [Trace.from_dict(row) for row in read_rows(directory / TRACES_FILE)]
    kept = sorted((t for t in rows if t.kept), key=lambda t: (t.problem_id, t.draw))
    if not kept:
        raise UserError(f"{directory / TRACES_FILE} holds no correct trace: run kvsweep-predictor traces first.")
    return kept


def written(plan: Plan, load: Callable[[], LoadedModel], done: set[tuple[str, int]]) -> Iterator[Trace]:
    """Let the model write with its full cache what is not done, and grade it."""
    problems, kind = trace_problems(plan)
    model = load()
    golds = {p.id: p.gold for p in problems}
    branch = (Branch(cell_id="", policy=FullCache(name="full")),)
    prompts = {p.id: model.prompt_ids(p.prompt) for p in problems}
    requests = [
        Request(problem_id=p.id, draw=draw, prompt_ids=prompts[p.id], branches=branch)
        for p in problems
        for draw in range(plan.recipe.draws)
        if (p.id, draw) not in done
    ]
    if not requests:
        return
    recipe = plan.recipe
    engine = Engine.sized_for(
        requests, model, decoding=plan.decoding, seed=recipe.seed, slots=recipe.slots, impl=recipe.impl
    )
    for _, completion in tqdm(engine.generate(requests), total=len(requests), desc="traces"):
        gold = golds[completion.problem_id]
        correct = judge(completion.text, completion.stop_reason, gold, kind)[1] == "correct"
        yield trace_of(completion, prompts[completion.problem_id], correct, model)


def trace_of(completion: Completion, prompt: Sequence[int], correct: bool, model: LoadedModel) -> Trace:
    """A completion as a trace, without its stop token, which is never fed; kept if correct, closed and answered."""
    ids = [i for i in completion.token_ids if i not in model.stop_ids]
    closing = ids.index(model.think_end_id) if model.think_end_id in ids else None
    kept = correct and closing is not None and 1 < closing < len(ids) - 1 and not completion.evictions
    return Trace(
        problem_id=completion.problem_id,
        draw=completion.draw,
        kept=kept,
        token_ids=[*prompt, *ids] if kept else [],
        think_start=len(prompt),
        think_end=len(prompt) + (closing or 0),
    )


def trace_problems(plan: Plan) -> tuple[list[Problem], AnswerKind]:
    """The problems to write on, and how their answers are read; toy ones hold none that an evaluation asks."""
    if plan.recipe.toy_problems is None:
        if plan.benchmark is None:
            raise UserError("no problems to write traces on: give recipe.toy_problems= or benchmark.path=FILE.")
        return list(load_problems(plan.benchmark).problems), plan.benchmark.answer_kind
    problems = []
    for task, spec in TASKS.items():
        stream = training_problems(task, Random(f"kvsweep-toy-traces-{plan.recipe.seed}-{task}"), spec.eval_sizes)
        toys = [next(stream) for _ in range(plan.recipe.toy_problems // len(TASKS))]
        problems += [Problem(id=t.id, prompt=t.question, gold=str(t.answer)) for t in toys]
    return problems, "integer"


def imported(plan: Plan, model: LoadedModel) -> Iterator[Trace]:
    """Traces from a cell's folder, or from a JSONL of rows with problem and text, and gold or correct.

    Raises:
        UserError: no such place, or a row without what is needed.
    """
    source = Path(str(plan.recipe.import_from))
    if source.is_dir():
        prompts = {p.id: p.prompt for p in map(Problem.from_dict, read_rows(source / PROBLEMS_FILE))}
        grades = {(g["problem_id"], g["draw"]): g["correct"] for g in read_shards(source, GRADES_FILE)}
        for completion in map(Completion.from_dict, read_shards(source, COMPLETIONS_FILE)):
            if completion.key in grades:
                prompt = model.prompt_ids(prompts[completion.problem_id])
                yield trace_of(completion, prompt, grades[completion.key] == 1, model)
        return
    if not source.is_file():
        raise UserError(f"recipe.import_from={source} does not exist: give a cell's folder or a JSONL file.")
    tags = ThinkTags(start=plan.recipe.open_tag, end=plan.recipe.close_tag)
    for number, row in enumerate(read_rows(source), start=1):
        where = f"{source}:{number}"
        if not {"problem", "text"} <= row.keys() or not {"gold", "correct"} & row.keys():
            raise UserError(f"{where} must name problem, text, and gold or correct.")
        try:
            yield trace_of_text(row, str(row.get("id", number)), tags, model, where)
        except UserError as error:
            tqdm.write(f"left out: {error}")


def trace_of_text(row: dict, problem_id: str, tags: ThinkTags, model: LoadedModel, where: str) -> Trace:
    """One row's text, its question through the chat template, its tags replaced by the model's own."""
    text = row["text"]
    parts = segment_text(text, tags, name=where)
    thinking, answer = text[parts.thinking_start : parts.thinking_end], text[parts.answer_start :]
    verdict = judge(f"</think>{answer}", "stop", str(row.get("gold")), "integer")[1] == "correct"
    prompt = model.prompt_ids(row["problem"])
    before = [*prompt, *model.tokenizer(thinking, add_special_tokens=False).input_ids]
    return Trace(
        problem_id=problem_id,
        draw=int(row.get("draw", 0)),
        kept=bool(row.get("correct", verdict)),
        token_ids=[*before, model.think_end_id, *model.tokenizer(answer, add_special_tokens=False).input_ids],
        think_start=len(prompt),
        think_end=len(before),
    )
