"""A replay as a job of the sweep: the same cells, launchers, shards and locks; it writes rows of replayed texts.

The texts are the full cache's own, or those of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Self

from omegaconf import OmegaConf
from pydantic import Field
from tqdm import tqdm

from kvsweep.base import records
from kvsweep.base.errors import UserError
from kvsweep.base.files import digests
from kvsweep.base.records import Completion, Pair, Problem, Row, read_rows, shard_files
from kvsweep.base.tasks import State, TaskStatus
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.sweep.plan.cell import Cell
from kvsweep.harness.sweep.plan.config import UNTRACKED
from kvsweep.harness.sweep.plan.job import Job, make_job, stored_config
from kvsweep.harness.sweep.run.store import stored_pairs

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What is replayed: the first `limit` texts, and the first `tokens` tokens of each; None for all.

    `texts` is a file of lines with id, problem and text; None for the full cache's texts of the same sweep.
    """

    texts: str | None = None
    limit: Annotated[int, Field(ge=1, description="a number of texts")] | None = 20
    tokens: Annotated[int, Field(ge=1, description="a number of tokens")] | None = None

    @property
    def file(self) -> str:
        """The name of the cells' file of rows. Other texts have another file, so that rows are never mixed."""
        parts = [] if self.texts is None else [Path(self.texts).stem, _digest(self.texts)]
        parts += [] if self.tokens is None else [f"first{self.tokens}"]
        stem, suffix = records.REPLAY_FILE.split(".")
        return f"{'_'.join([stem, *parts])}.{suffix}"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A question and the text that follows it: token ids, or the words of a file."""

    pair: Pair
    prompt: str
    token_ids: tuple[int, ...] = ()
    words: str = ""

    def request(self, model: LoadedModel, tokens: int | None, branches: Iterable[Branch] = ()) -> Request:
        """The request that replays the text's first tokens, at most `tokens`, in each branch."""
        ids = self.token_ids or tuple(model.tokenizer(self.words, add_special_tokens=False).input_ids)
        (name, draw), prompt_ids = self.pair, model.prompt_ids(self.prompt)
        known: dict[str, Any] = {"forced": ids[:tokens], "replayed": True}
        return Request(problem_id=name, draw=draw, prompt_ids=prompt_ids, branches=tuple(branches), **known)


class _Line(Row, frozen=True, kw_only=True):
    id: str
    problem: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ReplayJob(Job):
    """The replay of some texts, `replay`, through the cells of a job."""

    replay: ReplayConfig

    @classmethod
    def of(cls, job: Job, config: ReplayConfig) -> Self:
        """The replay of a job's cells; a cell gets as many texts whatever its draws."""
        own = {field.name: getattr(job, field.name) for field in fields(Job)}
        own |= {"rounds": (), "finish": False, "draws": 1, "tracker": UNTRACKED, "work": execute}
        return cls(**own, replay=config)

    @cached_property
    def texts(self) -> list[Text]:
        """The texts of the replay's file, else of the full cache."""
        path, limit = self.replay.texts, self.replay.limit
        found = _of_file(Path(path))[:limit] if path is not None else _of_full_cache(self, limit)
        if len({text.pair for text in found}) < len(found):
            raise UserError(f"texts={path} has two lines of the same id: give each an id of its own.")
        return found

    @property
    def rows_file(self) -> str:
        return self.replay.file

    @property
    def own_pairs(self) -> list[Pair]:
        return self.shard.of([text.pair for text in self.texts])

    @property
    def new_pairs(self) -> list[Pair]:
        """The texts of this job's shard: a replay has one round."""
        return self.own_pairs

    def unfinished_cells(self) -> list[Cell]:
        """The cells that lack a row of some text of this shard."""
        wanted, run = set(self.own_pairs), self.run_directory
        return [cell for cell in self.cells if not wanted <= stored_pairs(run / cell.cell_id, self.rows_file)]

    def status(self, state: State, decided: Mapping[str, int] = MappingProxyType({})) -> TaskStatus:
        """The status of a task of its own, beside the one that decodes the cells."""
        status = super().status(state, decided)
        status.task, status.replays = f"replay-{status.task}", True
        return status


def execute(job: Job, grader: Any, progress: tqdm) -> None:
    """Write the rows that the cells lack, a text at a time; nothing is graded."""
    from kvsweep.harness.provenance import describe_arithmetic, describe_process
    from kvsweep.harness.replay.measure import replay
    from kvsweep.harness.sweep.run.decode_cells import loaded
    from kvsweep.harness.sweep.run.open_cells import open_cells

    assert isinstance(job, ReplayJob)
    cells = job.unfinished_cells()
    progress.update(len(job.own_pairs) * (len(job.cells) - len(cells)))
    if not cells:
        return
    with open_cells(job, cells, job.status("running"), progress) as work:
        decoding_pass = describe_process()
        decoding_pass["arithmetic"] = describe_arithmetic(invariant=False, impl=job.impl, dtype=job.model.dtype)
        for store in work.stores.values():
            if not shard_files(store.directory, records.PROVENANCE_FILE):  # nothing of the cell was decoded yet
                what = {"expected": 0, "draws": job.draws, "random_weights": job.model.random_weights}
                store.begin_pass({**what, "config": job.resolved}, decoding_pass)
        lacking = {t: [cell for cell in cells if work.lacks(cell.cell_id, t.pair)] for t in job.shard.of(job.texts)}
        wanted = {text: found for text, found in lacking.items() if found}
        progress.set_description(f"{job.name}, replay")
        for cell_id, row in replay(loaded(job.model), job, wanted, job.replay.tokens):
            work.append(cell_id, row)


def read_jobs(directory: Path) -> list[Job]:
    """The jobs that wrote the cells of a run directory, as their provenance has them."""
    found: dict[str, dict[str, Any]] = {}
    for folder, _ in records.read_cells(directory):
        for file in shard_files(folder, records.PROVENANCE_FILE).values():
            config = stored_config(file)
            config |= {"results_dir": str(directory.resolve().parent), "run_name": directory.resolve().name}
            config |= {"shard": "1/1", "until": None, "finish": False}
            # Jobs that differ in their policies alone are one grid; a policy's own settings keep them apart.
            found.setdefault(records.content_hash(config), config)
    if not found:
        raise UserError(f"{directory} holds no cell that a sweep has begun: give the folder of a run.")
    # The jobs of one model, benchmark and precision become one job.
    groups: dict[str, Job] = {}
    for job in (make_job(OmegaConf.create(config)) for config in found.values()):
        key = records.content_hash([job.cells[0].describe()["condition"], job.cache.identity()])
        first = groups.setdefault(key, job)
        cells = {cell.cell_id: cell for cell in (*first.cells, *job.cells)}
        inputs = {**first.inputs, **job.inputs}
        groups[key] = replace(first, cells=tuple(cells.values()), inputs=inputs, rounds=(), margin=None)
    return list(groups.values())


def _of_file(path: Path) -> list[Text]:
    if not path.is_file():
        raise UserError(f"texts={path} is no file: name a file of lines with id, problem and text.")
    texts = [Text(pair=(line.id, 0), prompt=line.problem, words=line.text) for line in read_rows(path, _Line)]
    if not texts or any(not text.words.strip() for text in texts):
        raise UserError(f"texts={path} holds no text, or an empty one: give every line a text.")
    return texts


def _of_full_cache(job: Job, limit: int | None) -> list[Text]:
    """The first draw of the first problems, as the full cache of the job's own conditions wrote them."""
    folder = _full_cell(job)
    questions = {problem.id: problem.prompt for problem in read_rows(folder / records.PROBLEMS_FILE, Problem)}
    wanted = set(islice(job.problem_ids, limit))
    rows = records.read_shards(folder, records.COMPLETIONS_FILE, Completion)
    found = {row.problem_id: row for row in rows if row.draw == 0 and row.problem_id in wanted}
    if lacking := wanted - found.keys():
        unwritten = f"the full cache has not written {len(lacking)} of the {len(wanted)} texts yet"
        mend = "run its cell first (policy=full), lower limit=, or give texts=FILE"
        raise UserError(f"{job.name}: {unwritten}: {mend}.")
    texts = {name: tuple(found[name].token_ids) for name in job.problem_ids if name in wanted}
    return [Text(pair=(name, 0), prompt=questions[name], token_ids=ids) for name, ids in texts.items()]


def _full_cell(job: Job) -> Path:
    condition = job.cells[0].describe()["condition"]
    for folder, cell in records.read_cells(job.run_directory):
        if cell["condition"] == condition and cell["policy"]["name"] == "full" and "cache" not in cell:
            return folder
    lacking = "holds no full cache's cell of the same conditions, whose texts could be replayed"
    mend = "run that cell first (policy=full), or give texts=FILE"
    raise UserError(f"{job.name}: {job.run_directory} {lacking}: {mend}.")


def _digest(path: str) -> str:
    try:
        return digests([Path(path)])[0][:8]
    except OSError as error:
        raise UserError(f"texts={path} cannot be read ({error.strerror or error}): name a file of lines.") from error
