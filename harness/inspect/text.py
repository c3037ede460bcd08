"""A text to look into: a stored completion of a cell, a row of a JSONL of texts, or one written on the spot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from tokenizers.decoders import DecodeStream

from analysis.records import (
    CELL_FILE,
    COMPLETIONS_FILE,
    PROBLEMS_FILE,
    PROVENANCE_FILE,
    Completion,
    Problem,
    UserError,
    read_rows,
    read_shards,
)
from compression.policy import BudgetPolicy
from harness.decode.engine import Engine
from harness.decode.request import Branch, Request
from harness.models.config import ModelConfig
from harness.models.load import LoadedModel
from harness.predictor.traces import Trace, trace_of_text
from harness.settings import CONF, build
from harness.sweep.job import Job, build_policies, check_predictors, plan


class NotInText(UserError):
    """The text does not have what is asked for; another one may."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One text, with its model.

    Attributes:
        trace: its tokens and where the thinking lies; `think_end` is the text's end where the thinking never closes.
        completion: what the engine said of it, None for a text from elsewhere.
    """

    model: LoadedModel
    trace: Trace
    completion: Completion | None = None

    @property
    def closed(self) -> bool:
        """Whether an answer follows the thinking."""
        return self.trace.think_end + 1 < len(self.trace.token_ids)

    @property
    def title(self) -> str:
        """What pictures of it are called."""
        return f"{self.model.config.title}: {self.trace.problem_id}, draw {self.trace.draw}"

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token; one that ends inside a character has none, the one that completes it has it."""
        stream = DecodeStream(skip_special_tokens=False)
        backend = self.model.tokenizer.backend_tokenizer
        return [stream.step(backend, token) or "" for token in self.trace.token_ids]

    @property
    def thinking(self) -> list[str]:
        """The text of each thinking token."""
        return self.pieces[self.trace.think_start : self.trace.think_end]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a text comes from, checked before its model is loaded.

    Attributes:
        model: which model.
        config: the whole configuration that it comes with.
        read: the text, given its model.
    """

    model: ModelConfig
    config: DictConfig
    read: Callable[[LoadedModel], Traced]

    def policies(self, names: Sequence[str]) -> list[BudgetPolicy]:
        """Policies with scores, by name, in the setting of the configuration.

        Raises:
            UserError: one that is unknown, or has no scores, or whose predictor is not this model's.
        """
        if not names:
            return []
        known = sorted(path.stem for path in (CONF / "policy").glob("*.yaml"))
        if unknown := sorted(set(names) - set(known)):
            raise UserError(f"--scores {unknown[0]} is no policy: choose from {', '.join(known)}.")
        values: Any = OmegaConf.to_container(self.config)
        policies = build_policies(DictConfig({**values, "grid": {"policy": list(names)}}))
        check_predictors(self.model, policies)
        for policy in policies:
            if not isinstance(policy, BudgetPolicy):
                raise UserError(f"--scores {policy.name} cannot be drawn: it keeps everything and scores nothing.")
        return policies  # type: ignore[return-value]


def of_cell(folder: Path, problem_id: str | None, draw: int, overrides: Sequence[str] = ()) -> Source:
    """A stored completion of a cell; overrides of model and policy say where what the cell was run with lies now.

    Raises:
        UserError: the folder is no cell's, or holds no such completion; an override that is none of these, or names
            other weights.
    """
    if not (folder / CELL_FILE).is_file():
        raise UserError(
            f"{folder} is no cell's folder: name one that holds {CELL_FILE}, a folder in a run's directory."
        )
    if foreign := [o for o in overrides if not o.startswith(("model.", "policy."))]:
        raise UserError(
            f"{foreign[0]} cannot be given with a cell's folder, whose settings are the cell's own: only where things "
            "lie now may be told, as in model.path=DIR model.predictor=DIR policy.predictor=DIR."
        )
    source = of_completion(folder, _find(folder, problem_id, draw), overrides)
    used = yaml.safe_load((folder / CELL_FILE).read_text())["model"]["weights"]
    if overrides and source.model.identity()["weights"] != used:
        raise UserError(f"model.path={source.model.path} holds other weights than {folder} was run with: correct it.")
    return source


def of_completion(folder: Path, completion: Completion, overrides: Sequence[str] = ()) -> Source:
    """A completion of a cell, with the configuration of the run and the size of the cell's policy."""
    questions = {p.id: p.prompt for p in map(Problem.from_dict, read_rows(folder / PROBLEMS_FILE))}
    stored = json.loads((folder / PROVENANCE_FILE).read_text())["config"]
    own = yaml.safe_load((folder / CELL_FILE).read_text())["policy"]
    policy = stored["policy"]
    stored["policy"] = {**policy, **{k: own[k] for k in BudgetPolicy.SHARED if k in own and k in policy}}
    if "question" in policy and "question" in own:
        stored["policy"]["question_on_top"] = None  # the older spelling of the same setting
    config = DictConfig(OmegaConf.merge(stored, OmegaConf.from_dotlist(list(overrides))))
    # A run of another version may name settings that this one does not have.
    known = {str(field.name) for field in fields(ModelConfig)}
    model = {k: v for k, v in config.model.items() if k in known}
    return Source(
        model=build(ModelConfig, "model", model),
        config=config,
        read=partial(_traced, questions[completion.problem_id], completion),
    )


def _traced(question: str, completion: Completion, model: LoadedModel) -> Traced:
    prompt = model.prompt_ids(question)
    ids = [i for i in completion.token_ids if i not in model.stop_ids]
    closing = ids.index(model.think_end_id) if model.think_end_id in ids else len(ids)
    trace = Trace(
        problem_id=completion.problem_id,
        draw=completion.draw,
        kept=True,
        token_ids=[*prompt, *ids],
        think_start=len(prompt),
        think_end=len(prompt) + closing,
    )
    return Traced(model=model, trace=trace, completion=completion)


def _find(folder: Path, problem_id: str | None, draw: int) -> Completion:
    found: list[str] = []
    for row in read_shards(folder, COMPLETIONS_FILE):
        if problem_id in (None, row["problem_id"]) and row["draw"] == draw:
            return Completion.from_dict(row)
        found.append(f"{row['problem_id']}/{row['draw']}")
    some = ", ".join(sorted(found)[:5]) or "none"
    raise UserError(f"--problem {problem_id} --draw {draw} is not among the completions of {folder}: it has {some} ...")


def of_text(path: Path, problem_id: str | None, draw: int, overrides: Sequence[str] = ()) -> Source:
    """A row of a JSONL of texts (problem, text; id and draw where there are several), with the model of the overrides.

    Raises:
        UserError: no such row, or one without problem, text or (once it is read) a closed thinking.
    """
    for number, row in enumerate(read_rows(path), start=1):
        name = str(row.get("id", number))
        if problem_id in (None, name) and int(row.get("draw", 0)) == draw:
            where = f"{path}:{number}"
            if not {"problem", "text"} <= row.keys():
                raise UserError(f"{where} must name problem and text.")
            config = composed(overrides)
            return Source(
                model=build(ModelConfig, "model", config.model),
                config=config,
                read=partial(_of_row, row, name, draw, where),
            )
    raise UserError(f"--problem {problem_id} --draw {draw} is not in {path}: name the id of a row, or its line number.")


def _of_row(row: Mapping[str, Any], name: str, draw: int, where: str, model: LoadedModel) -> Traced:
    trace = trace_of_text(dict(row), name, model.config.tags, model, where)
    return Traced(model=model, trace=replace(trace, draw=draw))


def live(overrides: Sequence[str], problem_id: str | None, draw: int, question: str | None = None) -> Source:
    """A completion that is written when it is read: of a benchmark's problem, or of a question.

    It is the one that the cell of these settings has.

    Raises:
        UserError: settings that are no cell's, or more than one's; a problem that the benchmark does not have.
    """
    config = composed(overrides)
    job = plan(config)
    if len(job.cells) > 1:
        raise UserError(f"the grid has {len(job.cells)} cells and live writes one completion: leave out grid.*.")
    if question is not None:
        problem: Problem | None = Problem(id=problem_id or "question", prompt=question, gold="")
    else:
        problem = next((p for p in job.benchmark.problems if problem_id in (None, p.id)), None)
    if problem is None:
        some = ", ".join(job.problem_ids[:5])
        raise UserError(f"--problem {problem_id} is not in {job.benchmark.name}: it has {some} ...")
    return Source(model=job.model, config=config, read=partial(_written, job, problem, draw))


def _written(job: Job, problem: Problem, draw: int, model: LoadedModel) -> Traced:
    (cell,) = job.cells
    request = Request(
        problem_id=problem.id,
        draw=draw,
        prompt_ids=model.prompt_ids(problem.prompt),
        branches=(Branch(cell_id="", policy=cell.policy),),
    )
    engine = Engine.sized_for([request], model, decoding=job.decoding, seed=job.seed, slots=1, impl=job.impl)
    ((_, completion),) = engine.generate([request])
    return _traced(problem.prompt, completion, model)


def composed(overrides: Sequence[str]) -> DictConfig:
    """The configuration that `kvsweep KEY=VALUE ...` would see."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose("config", list(overrides))
