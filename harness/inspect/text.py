"""A text to inspect: a stored completion of a cell, a row of a JSONL of texts, or a completion written on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from kvsweep.analysis.format import setting_of
from kvsweep.base.errors import UserError
from kvsweep.base.records import CELL_FILE, PROVENANCE_FILE, Completion, Grade, Problem, read_cell, read_rows
from kvsweep.compression import artifacts
from kvsweep.compression.policy import BudgetPolicy
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.grading.grader import Grader, standard_of
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import read_spec
from kvsweep.harness.predictor.traces import Trace, read_graded, trace_of, trace_of_text
from kvsweep.harness.settings import build, choices, compose_config, plain_config_errors
from kvsweep.harness.sweep.plan.grid import build_policies
from kvsweep.harness.sweep.plan.job import Job, check_predictors, make_job, stored_config

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel


class NotInText(UserError):
    """The text does not have what is asked for; another text may."""


@dataclass(frozen=True, kw_only=True)
class InspectedText:
    """One text and its model. `completion` is None for a text from a file; `setting` names its policy in words."""

    model: LoadedModel
    trace: Trace
    completion: Completion | None = None
    setting: str = ""
    grade: Grade | None = None

    @property
    def title(self) -> str:
        """The title of the text's pictures in two lines: model, problem and draw; policy, setting and outcome."""
        written = ", ".join(part for part in (self.setting, self.outcome) if part)
        return f"{self.model.config.title}: {self.trace.problem_id}, draw {self.trace.draw}\n{written}".strip()

    @property
    def outcome(self) -> str:
        """The outcome in words, as "correct" or "no answer"; empty where there is no grade or nothing to compare."""
        return self.grade.outcome.replace("_", " ") if self.grade and self.grade.gold else ""

    @property
    def summary(self) -> str:
        """The text as it was written, and below it answer, outcome, length and evictions; it must be a completion."""
        assert self.completion is not None
        done, answer = self.completion, self.grade and self.grade.answer
        gold = f" for {self.grade.gold}: {self.outcome}" if self.grade and self.outcome else ""
        size = f"{done.num_tokens} tokens ({done.stop_reason}), {len(done.evictions)} evictions"
        return f"{done.text}\n\nanswer {answer or 'none'}{gold}; {size}"

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token. A character of several tokens belongs to the last of them; the others are empty."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self.model.tokenizer.backend_tokenizer, token) or "" for token in self.trace.token_ids]

    @property
    def thinking(self) -> list[str]:
        return self.pieces[self.trace.think_start : self.trace.think_end]


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A text that was found and checked before its model is loaded. `read` makes the text with the loaded model."""

    model: ModelConfig
    config: DictConfig
    read: Callable[[LoadedModel], InspectedText]

    @plain_config_errors()
    def policies(self, names: Sequence[str]) -> list[BudgetPolicy]:
        """Policies by name, with shared settings; an unknown one, or without scores, or of another model is refused."""
        if not names:
            return []
        known = choices("policy")
        if unknown := sorted(set(names) - set(known)):
            raise UserError(f"--scores {unknown[0]} is no policy: choose from {', '.join(known)}.")
        values: Any = OmegaConf.to_container(self.config)
        policies = build_policies(DictConfig({**values, "grid": {"policy": list(names)}}))
        check_predictors(self.model, policies)
        if others := [policy.name for policy in policies if not isinstance(policy, BudgetPolicy)]:
            raise UserError(f"--scores {others[0]} cannot be drawn: it keeps everything and scores nothing.")
        return [policy for policy in policies if isinstance(policy, BudgetPolicy)]

    def check_head(self, path: Path) -> None:
        try:
            artifacts.check("predictor", str(path), "kvsweep-predictor train")
            artifacts.load(path)
            width = artifacts.read_card("predictor", path)["hidden_size"]
        except (OSError, ValueError) as error:
            raise UserError(f"--head {path} holds no importance predictor ({error}): name another folder.") from error
        if width != (expected := read_spec(self.model).hidden_size):
            other = f"is of width {width} and {self.model.name} of {expected}"
            raise UserError(f"--head {path} {other}: name another head.")


@plain_config_errors()
def of_cell(folder: Path, problem_id: str | None, draw: int, overrides: Sequence[str] = ()) -> TextSource:
    """A stored completion of a cell. Overrides of model and policy tell where the cell's files lie now.

    A UserError refuses a folder without such a completion, an override of anything else, and other weights.
    """
    if not (folder / CELL_FILE).is_file():
        raise UserError(f"{folder} is no cell's folder: name a folder of a run's directory that holds {CELL_FILE}.")
    if foreign := [o for o in overrides if not o.startswith(("model.", "policy."))]:
        own = "cannot be given with a cell's folder, because the cell has its own settings"
        places = "model.path=DIR model.predictor=DIR policy.predictor=DIR"
        raise UserError(f"{foreign[0]} {own}: give only where files lie now, as in {places}.")
    stored = list(read_graded(folder))
    found = [row for row in stored if problem_id in (None, row[1].problem_id) and row[1].draw == draw]
    if not found:
        some = ", ".join(sorted(f"{c.problem_id}/{c.draw}" for _, c, _ in stored)[:5]) or "none"
        missing = f"--problem {problem_id} --draw {draw} is not among the completions of {folder}"
        raise UserError(f"{missing}: it has {some} ...")
    question, completion, grade = found[0]
    source = of_completion(folder, question, completion, overrides, grade)
    if source.model.identity()["weights"] != read_cell(folder)["model"]["weights"]:
        other = f"{source.model.place} holds other weights than {folder} was run with, or none"
        raise UserError(f"{other}: name the folder of its own with model.path=DIR.")
    return source


def of_completion(
    folder: Path, question: str, completion: Completion, overrides: Sequence[str] = (), grade: Grade | None = None
) -> TextSource:
    """A completion of a cell, with the run's configuration and the size of the cell's policy."""
    stored, own = stored_config(folder / PROVENANCE_FILE), read_cell(folder)["policy"]
    policy = stored["policy"] | {k: own[k] for k in BudgetPolicy.SHARED if k in own and k in stored["policy"]}
    if "rows" in policy:  # another spelling of keep_ratio and budget
        policy.update(rows=None, every=None)
    sections = {"model": stored["model"], "policy": policy}
    config = DictConfig(OmegaConf.merge(sections, OmegaConf.from_dotlist(list(overrides))))

    def read(loaded: LoadedModel) -> InspectedText:
        trace = trace_of(completion, loaded, loaded.prompt_ids(question))
        return InspectedText(model=loaded, trace=trace, completion=completion, setting=setting_of(own), grade=grade)

    return TextSource(model=build(ModelConfig, "model", config.model), config=config, read=read)


@plain_config_errors()
def of_file(path: Path, problem_id: str | None, draw: int, overrides: Sequence[str] = ()) -> TextSource:
    """A row of a JSONL of texts, with the model of the overrides. A row has problem and text, and may have id and draw.

    No such row, or a row that lacks a field, raises a UserError; so does `read` for a text that does not answer.
    """
    for number, row in enumerate(read_rows(path), start=1):
        name, where = str(row.get("id", number)), f"{path}:{number}"
        if problem_id in (None, name) and row.get("draw", 0) in (draw, str(draw)):
            break
    else:
        wanted = f"--problem {problem_id} --draw {draw}"
        raise UserError(f"{wanted} is not in {path}: name the id of a row, or its line number.")
    if not {"problem", "text"} <= row.keys():
        raise UserError(f"{where} must name problem and text.")

    def read(loaded: LoadedModel) -> InspectedText:
        return InspectedText(model=loaded, trace=trace_of_text(row, name, loaded.config.tags, loaded, where)[0])

    config = compose_config(*overrides)
    return TextSource(model=build(ModelConfig, "model", config.model), config=config, read=read)


@plain_config_errors()
def live(overrides: Sequence[str], problem_id: str | None, draw: int, question: str | None = None) -> TextSource:
    """The completion that `read` writes, as a cell would; settings of more cells, or no such problem, are refused."""
    job = make_job(config := compose_config(*overrides))
    if len(job.cells) > 1:
        raise UserError(f"the grid has {len(job.cells)} cells and live writes one completion: leave out grid.*.")
    found = [problem for problem in job.benchmark.problems if problem_id in (None, problem.id)]
    if question is not None:
        found = [Problem(id=problem_id or "question", prompt=question, gold="")]
    if not found:
        some = ", ".join(job.problem_ids[:5])
        raise UserError(f"--problem {problem_id} is not in {job.benchmark.name}: it has {some} ...")
    return TextSource(model=job.model, config=config, read=lambda loaded: _written(job, found[0], draw, loaded))


def _written(job: Job, problem: Problem, draw: int, model: LoadedModel) -> InspectedText:
    from kvsweep.harness.sweep.run.decode_cells import engine_of

    [cell], prompt = job.cells, model.prompt_ids(problem.prompt)
    branch = Branch(cell_id="", policy=cell.policy)
    request = Request(problem_id=problem.id, draw=draw, prompt_ids=prompt, branches=(branch,))
    ((_, completion),) = engine_of(job, [request], model, slots=1).generate([request])
    with Grader(workers=1) as grader:
        [grade] = grader.grade([completion], standard_of(cell.describe(), {problem.id: problem.gold}))
    trace, setting = trace_of(completion, model, prompt), setting_of(cell.policy.identity())
    return InspectedText(model=model, trace=trace, completion=completion, setting=setting, grade=grade)
