"""Stage 2: every kind of label and the last hidden states of the thinking tokens, from one forward per trace."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from analysis.records import UserError
from compression.policies.oracle import save_labels
from compression.rows import Prefill
from harness.models.load import LoadedModel
from harness.predictor.recipe import LABEL_KINDS, LabelKind, Recipe
from harness.predictor.traces import Trace, read_traces
from kernels.implementation import Implementation, operations

MANIFEST = "cache.json"


class LabelPass(Prefill):
    """Takes in each layer's queries and keys as the forward passes by, and keeps only the sums of their labels.

    Extra memory beside the forward's own, in bytes, for a text of L tokens: 4 L kv_heads (kinds + 2) for sums and one
    layer's columns, and about 16 q_heads (block^2 + L) for tiles, whatever the number of layers. A 16,384-token trace
    of an 8B Llama (32 query heads, 8 key heads, block 512) takes about 145 MB of tiles and 3 MB of sums; the forward
    itself holds L (4 hidden_size + 2 intermediate_size) numbers, 1.5 GB in bfloat16.
    """

    def __init__(
        self,
        answer_start: int,
        min_distance: int,
        kinds: tuple[LabelKind, ...] = LABEL_KINDS,
        impl: Implementation = "torch",
    ) -> None:
        super().__init__()
        self.operations = operations(impl)
        self.answer_start, self.min_distance, self.kinds = answer_start, min_distance, kinds
        self.totals: dict[LabelKind, Tensor] = {}
        self.layers = 0

    def observe(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Add one layer of one text, [1, heads, length, head_dim] each."""
        self.layers += 1
        for kind in self.kinds:
            heads = self.operations.importance_labels(
                query[0],
                key[0],
                kind=kind,
                scaling=scaling,
                answer_start=self.answer_start,
                min_distance=self.min_distance,
            )
            one = heads.amax(dim=0) if kind == "far_max" else heads.mean(dim=0)
            before = self.totals.get(kind)
            combine = torch.maximum if kind == "far_max" else torch.add
            self.totals[kind] = one if before is None else combine(before, one)

    def result(self) -> dict[LabelKind, Tensor]:
        """Each kind's label of every token, [length]: mean, or largest for far_max, over layers and heads."""
        return {kind: t if kind == "far_max" else t / self.layers for kind, t in self.totals.items()}


@torch.inference_mode()
def label_trace(
    model: LoadedModel,
    trace: Trace,
    min_distance: int,
    kinds: tuple[LabelKind, ...] = LABEL_KINDS,
    impl: Implementation = "torch",
) -> tuple[Tensor, dict[LabelKind, Tensor]]:
    """The thinking tokens' last hidden states [T, hidden_size] and labels [T], NaN where a token has none."""
    labels = LabelPass(trace.think_end + 1, min_distance, kinds, impl)
    ids = torch.tensor([trace.token_ids], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None]
    output = model.network.base_model(input_ids=ids, position_ids=positions, use_cache=False, prefill=labels)
    thinking = slice(trace.think_start, trace.think_end)
    return output.last_hidden_state[0, thinking], {k: v[thinking] for k, v in labels.result().items()}


def make_labels(recipe: Recipe, load: Callable[[], LoadedModel]) -> dict[str, Any]:
    """Write the shards that are missing; return the manifest. The model is loaded after the traces.

    Raises:
        UserError: labels of other traces, another model or another distance lie there.
    """
    traces, model = read_traces(recipe.directory), load()
    tokens = sum(t.think_end - t.think_start for t in traces)
    per_token = model.network.config.hidden_size * model.shape.dtype.itemsize + 4 * len(LABEL_KINDS)
    print(
        f"labels: {len(traces)} traces, {tokens} thinking tokens, {tokens * per_token / 2**20:.1f} MiB on disk",
        flush=True,
    )
    per_shard = max(1, round(len(traces) * recipe.shard_mib * 2**20 / (tokens * per_token)))
    shards = [traces[i : i + per_shard] for i in range(0, len(traces), per_shard)]
    manifest = {
        "model": model.config.identity(),
        "min_distance": recipe.min_distance,
        "hidden_size": model.network.config.hidden_size,
        "data": data_hash(traces),
        "traces": len(traces),
        "tokens": tokens,
        "shards": len(shards),
    }
    directory = recipe.directory / "cache"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / MANIFEST
    if path.exists() and json.loads(path.read_text()) != manifest:
        raise UserError(f"{directory} holds labels of other traces, model or settings: delete it or give another out.")
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    for number, shard in enumerate(tqdm(shards, desc="labels")):
        file = shard_path(directory, number)
        if not file.exists():
            write_shard(file, shard, model, recipe, manifest["data"])
    return manifest


def write_shard(path: Path, traces: list[Trace], model: LoadedModel, recipe: Recipe, data: str) -> None:
    """One file of some traces' hidden states and labels, end to end; `lengths` says where each begins."""
    hidden, labels = zip(*(label_trace(model, t, recipe.min_distance, impl=recipe.impl) for t in traces), strict=True)
    tensors: dict[str, Tensor] = {kind: torch.cat([label[kind] for label in labels]) for kind in LABEL_KINDS}
    held_out = [int(hashlib.sha256(t.problem_id.encode()).hexdigest(), 16) % recipe.held_out == 0 for t in traces]
    tensors["hidden"] = torch.cat(hidden)
    tensors["lengths"] = torch.tensor([len(h) for h in hidden])
    tensors["held_out"] = torch.tensor(held_out)
    temporary = path.with_suffix(".tmp")
    save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, temporary, metadata={"data": data})
    temporary.replace(path)


def shard_path(directory: Path, number: int) -> Path:
    """The file of a shard."""
    return directory / f"shard-{number:05}.safetensors"


def data_hash(traces: list[Trace]) -> str:
    """What the traces are, in 16 digits."""
    digest = hashlib.sha256()
    for trace in traces:
        digest.update(json.dumps(trace.to_dict()).encode())
    return digest.hexdigest()[:16]


def read_manifest(recipe: Recipe) -> dict[str, Any]:
    """The manifest of the labels.

    Raises:
        UserError: there are none.
    """
    path = recipe.directory / "cache" / MANIFEST
    if not path.exists():
        raise UserError(f"{path} does not exist: run kvsweep-predictor labels first.")
    return json.loads(path.read_text())


def read_shard(recipe: Recipe, number: int) -> Iterator[tuple[bool, Tensor, dict[LabelKind, Tensor]]]:
    """Yield each trace of a shard: whether it is held out, its hidden states, its labels.

    Raises:
        UserError: the file is missing, broken or not one of these.
    """
    path = shard_path(recipe.directory / "cache", number)
    try:
        tensors = load_file(path)
        lengths = tensors["lengths"].tolist()
        parts = {k: tensors[k].split(lengths) for k in ("hidden", *LABEL_KINDS)}
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise UserError(f"{path} is no shard of labels: delete it and run kvsweep-predictor labels again.") from error
    for index, held_out in enumerate(tensors["held_out"].tolist()):
        yield held_out, parts["hidden"][index], {k: parts[k][index] for k in LABEL_KINDS}


def write_oracle(recipe: Recipe) -> Path:
    """The traces' texts and targets in the file that the policy `oracle` reads; return its path."""
    manifest, traces = read_manifest(recipe), read_traces(recipe.directory)
    if manifest["data"] != data_hash(traces):
        raise UserError(f"{recipe.directory} holds labels of other traces: run kvsweep-predictor labels first.")
    shards = (read_shard(recipe, number) for number in range(manifest["shards"]))
    found = {}
    for trace, (_, _, labels) in zip(traces, itertools.chain.from_iterable(shards), strict=True):
        scores = torch.full((len(trace.token_ids),), torch.nan)
        scores[trace.think_start : trace.think_end] = target(labels, recipe.label)
        found[f"{trace.problem_id}/{trace.draw}"] = torch.tensor(trace.token_ids), scores
    path = recipe.directory / f"oracle_{'_'.join(recipe.label)}.safetensors"
    save_labels(path, found)
    return path


def target(labels: dict[LabelKind, Tensor], kinds: list[LabelKind]) -> Tensor:
    """The sum of one trace's standardised labels, in 0 to 1; NaN where a kind has none.

    Z-scores, shifted and scaled, as DynTS has it: the Softplus head gives nothing below zero.
    """
    total = torch.stack([standardise(labels[kind].float()) for kind in kinds]).sum(dim=0)
    return standardise(total)


def standardise(label: Tensor) -> Tensor:
    """One trace's label as z-scores shifted and scaled to 0 to 1; NaN stays, and a constant label is 0."""
    known = label[~label.isnan()]
    if not len(known):
        return label
    return (label - known.min()) / (known.max() - known.min()).clamp(min=1e-12)
