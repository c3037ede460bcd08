"""The completions of a replay: the full cache's own, or those of a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import PositiveFloat, PositiveInt

from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.sweep.job import Job
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files.other_rows import texts_of_file
from kvsweep.run_files.row_types import REPLAY_FILE, Completion, Pair
from kvsweep.run_files.run_reader import StoredCell, read_cells
from kvsweep.run_files.safe_files import digests

if TYPE_CHECKING:
    from kvsweep.harness.models.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What to replay: the first `limit` completions and the first `tokens` tokens of each; None for all.

    `texts` is a file of lines with id, problem and text; None for the full cache's completions in the same sweep.
    """

    texts: str | None = None
    limit: PositiveInt | None = 20
    tokens: PositiveInt | None = None

    @property
    def file(self) -> str:
        """The name of the cells' file of rows. Each source has its own file, so that rows are never mixed."""
        parts = [REPLAY_FILE.removesuffix(".jsonl")]
        if self.texts is not None:
            path = Path(self.texts)
            parts += [path.stem, digests([path])[0][:8]]
        if self.tokens is not None:
            parts.append(f"first{self.tokens}")
        return f"{'_'.join(parts)}.jsonl"


@dataclass(frozen=True, kw_only=True)
class TimeConfig(ReplayConfig):
    """What to time, and how: the completions side by side in the middle batch, and rounds, one turn per cell each.

    `memory_gb` is the memory of keys and values that the largest batch fills; None leaves out this batch.
    """

    slots: PositiveInt = 8
    memory_gb: PositiveFloat | None = None
    rounds: PositiveInt = 3


@dataclass(frozen=True, kw_only=True)
class Text:
    """A question and its completion: token ids, or a file's text."""

    pair: Pair
    prompt: str
    token_ids: tuple[int, ...] = ()
    words: str = ""

    def request(self, model: LoadedModel, tokens: int | None, branches: Iterable[Branch]) -> Request:
        """Return the request that replays at most `tokens` first tokens of the completion in each branch."""
        ids = self.token_ids or model.dialogue.completion_ids(self.words)
        return Request(
            problem_id=self.pair[0],
            draw=self.pair[1],
            prompt_ids=model.dialogue.prompt_ids(self.prompt),
            branches=tuple(branches),
            forced=ids[:tokens],
            replayed=True,
        )


def read_texts(job: Job, config: ReplayConfig) -> list[Text]:
    """Return the completions in the replay's file, else those of the full cache under the job's conditions."""
    if config.texts is None:
        return _of_full_cache(job, config.limit)
    path = Path(config.texts)
    if not path.is_file():
        raise UserError(f"texts={path} is no file: name a file of lines with id, problem and text.")
    texts = [Text(pair=(row.id, 0), prompt=row.problem, words=row.text) for _, row in texts_of_file(path)]
    if not texts:
        raise UserError(f"texts={path} holds no text: give a line for each.")
    texts = texts[: config.limit]
    if len({text.pair for text in texts}) < len(texts):
        raise UserError(f"texts={path} has two lines of the same id: give each an id of its own.")
    return texts


def _of_full_cache(job: Job, limit: int | None) -> list[Text]:
    """Return the full cache's first draw of the first problems, under the job's conditions."""
    cell = _full_cell(job)
    problems = cell.problems()
    ids = dict.fromkeys(job.problem_ids[:limit])  # each once, in order
    completions = {row.problem_id: row for row in cell.rows(Completion) if row.draw == 0}
    missing = ids.keys() - completions.keys()
    if missing:
        raise UserError(
            f"{job.name}: the full cache has not written {len(missing)} of the {len(ids)} texts yet: "
            "run its cell first (policy=full), lower limit=, or give texts=FILE."
        )
    broken = [problem_id for problem_id in ids if completions[problem_id].stop_reason == "not_finite"]
    if broken:
        raise UserError(
            f"{job.name}: of the full cache's texts, {counted(len(broken), 'text')} ended because logits "
            f"were NaN or infinite ({broken[0]!r:.80}): take model.dtype=bfloat16 or float32."
        )
    texts = []
    for problem_id in ids:
        token_ids = tuple(completions[problem_id].token_ids)
        texts.append(Text(pair=(problem_id, 0), prompt=problems[problem_id].prompt, token_ids=token_ids))
    return texts


def _full_cell(job: Job) -> StoredCell:
    """Return the stored cell of the full, unpacked cache under the job's conditions."""
    condition = job.cells[0].describe()["condition"]
    for cell, settings in read_cells(job.run_directory):
        is_full_cache = settings["policy"]["name"] == "full" and "cache" not in settings  # named only if quantized
        if is_full_cache and settings["condition"] == condition:
            return cell
    raise UserError(
        f"{job.name}: {job.run_directory} holds no full cache's cell of the same conditions, whose texts could be "
        "replayed: run that cell first (policy=full), or give texts=FILE."
    )
