"""Stage 2: labels and last hidden states of the thinking, one forward per trace; UserError for faulty shards."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.policies.oracle import save_labels
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.recipe import LABEL_KINDS, LabelKind, PredictorSettings, Recipe, Target, read_manifest
from kvsweep.harness.predictor.traces import Trace, read_traces
from kvsweep.kernels.implementation import Implementation, operations
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import replace_text, replacing

Labels = Mapping[LabelKind, Tensor]  # [T] each


class LabelPass(Prefill):
    """Receives each layer's queries and keys during a forward, and keeps only their labels.

    Extra bytes for a text of L tokens: 4 L kinds for each layer's labels, 4 L kv_heads (kinds + 2) for one layer's sums
    and columns, and about 16 q_heads (block^2 + L) for tiles: 150 MB for 16,384 tokens of an 8B Llama.
    """

    def __init__(self, answer_start: int, min_distance: int, kinds: Sequence[LabelKind], impl: Implementation) -> None:
        super().__init__()
        self.label = partial(operations(impl).importance_labels, answer_start=answer_start, min_distance=min_distance)
        self.kinds = kinds
        self.labels = defaultdict[LabelKind, list[Tensor]](list)  # of each layer, [length]

    def observe(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, *extras: Any) -> None:
        """Add one full layer, [1, heads, length, head_dim] each; raises UserError for `extras` (sinks, softcap)."""
        if any(extra is not None for extra in extras):
            raise UserError(
                "importance labels are of plain attention, without sinks or a softcap: choose another model."
            )
        for kind in self.kinds:
            label_by_head = self.label(query[0], key[0], kind=kind, scaling=scaling)  # [kv_heads, length]
            label = label_by_head.amax(dim=0) if kind == "far_max" else label_by_head.mean(dim=0)
            self.labels[kind].append(label)

    def result(self) -> dict[LabelKind, Tensor]:
        """Each kind's label of every token, [length]: the mean over layers and heads, or the largest for far_max."""
        result = {}
        for kind, labels in self.labels.items():
            result[kind] = (
                reduce(torch.maximum, labels) if kind == "far_max" else reduce(torch.add, labels) / len(labels)
            )
        return result


def read_whole(model: LoadedModel, token_ids: Sequence[int], prefill: Prefill) -> Tensor:
    """Read a text in one forward, which `prefill` observes; return the last hidden states [length, hidden_size]."""
    model.check_length(len(token_ids))
    ids = torch.tensor([token_ids], device=model.device)
    # Only linear layers need a cache to read a whole text.
    hidden = model.read(ids, 0, prefill, model.new_cache() if model.shape.states else None)[0]
    model.check_finite(hidden, f"a text of {len(token_ids)} tokens")
    return hidden


@torch.inference_mode()
def label_trace(
    model: LoadedModel, trace: Trace, min_distance: int, kinds: Sequence[LabelKind], impl: Implementation = "torch"
) -> tuple[Tensor, dict[LabelKind, Tensor]]:
    """Return the thinking tokens' last hidden states [T, hidden_size] and labels [T], NaN without a label."""
    if kinds:
        model.check_rows("labels are attention to its rows")
    labels = LabelPass(trace.answer_start, min_distance, kinds, impl)
    hidden = read_whole(model, trace.token_ids, labels)
    thinking = slice(trace.think_start, trace.think_end)
    return hidden[thinking], {kind: label[thinking] for kind, label in labels.result().items()}


def make_labels(settings: PredictorSettings) -> dict[str, Any]:
    """Write the missing label shards; return the manifest. Raises UserError if the folder has other labels."""
    recipe, traces = settings.recipe, read_traces(settings)
    model = settings.loaded
    hidden_size = model.spec.hidden_size
    tokens = sum(trace.think_end - trace.think_start + recipe.lead for trace in traces)
    token_bytes = hidden_size * model.shape.dtype.itemsize + 4 * len(LABEL_KINDS)
    mib = tokens * token_bytes / 2**20
    print(f"labels: {len(traces)} traces, {tokens} thinking tokens, {mib:.1f} MiB on disk", flush=True)
    per_shard = max(1, round(len(traces) * recipe.shard_mib / mib))  # traces of mean length that fill a shard
    shards = [traces[i : i + per_shard] for i in range(0, len(traces), per_shard)]
    manifest: dict[str, Any] = {
        "model": model.config.identity(),
        "min_distance": recipe.min_distance,
        "hidden_size": hidden_size,
        "data": data_hash(traces),
    }
    if recipe.lead:
        manifest["lead"] = recipe.lead
    manifest |= {"traces": len(traces), "tokens": tokens, "shards": len(shards)}
    text = json.dumps(manifest, indent=2) + "\n"
    if recipe.manifest.exists() and recipe.manifest.read_bytes() != text.encode():
        raise UserError(
            f"{recipe.labels} holds labels of other traces, model or settings, or {recipe.manifest.name} is broken: "
            "delete it or set recipe.out=."
        )
    recipe.labels.mkdir(parents=True, exist_ok=True)
    replace_text(recipe.manifest, text)
    for number, shard in enumerate(tqdm(shards, desc="labels")):
        path = shard_path(recipe.labels, number)
        about = json.dumps({"manifest": manifest, "problems": [trace.problem_id for trace in shard]})
        if _about(path) != about:  # missing, broken, or left by a run on other traces
            write_shard(path, shard, model, recipe, about)
    return manifest


def _about(path: Path) -> str:
    """Return a shard's description as JSON, {} of a file that is none: safetensors writes several in any order."""
    with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("about", "{}")
    return "{}"


def write_shard(path: Path, traces: Sequence[Trace], model: LoadedModel, recipe: Recipe, about: str) -> None:
    """Write the traces' hidden states and labels, concatenated, with the length of each; `about` describes them."""
    rows: list[dict[Any, Tensor]] = []
    for trace in traces:
        longer = with_lead(trace, recipe.lead)
        hidden, labels = label_trace(model, longer, recipe.min_distance, LABEL_KINDS, recipe.impl)
        rows.append({**labels, "hidden": hidden, "lengths": torch.tensor([len(hidden)])})
    tensors = {}
    for name in (*LABEL_KINDS, "hidden", "lengths"):
        tensors[name] = torch.cat([row[name] for row in rows]).cpu()
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"about": about})


def with_lead(trace: Trace, lead: int) -> Trace:
    """Return a trace whose thinking begins with the last `lead` tokens of the prompt."""
    return replace(trace, think_start=trace.think_start - lead)


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05}.safetensors"


def data_hash(traces: Sequence[Trace]) -> str:
    """Return a hash of the traces' contents, in their order."""
    digest = hashlib.sha256()
    for trace in traces:
        digest.update(json.dumps(trace.to_dict()).encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class StoredTrace:
    """A trace's place in an open shard. The file is mapped into memory, so that a read fetches these rows alone."""

    file: Any
    rows: slice
    held_out: bool

    def read(self) -> tuple[Tensor, Labels]:
        """Return the trace's hidden states [T, hidden_size] and its labels."""
        hidden = self.file.get_slice("hidden")[self.rows]
        return hidden, {kind: self.file.get_slice(kind)[self.rows] for kind in LABEL_KINDS}


def open_shard(recipe: Recipe, manifest: Mapping[str, Any], number: int) -> list[StoredTrace]:
    """Return the places of a shard's traces; raises UserError for a broken shard or one of other traces."""
    path = shard_path(recipe.labels, number)
    about = json.loads(_about(path))
    if about.get("manifest") != manifest:
        raise UserError(f"{path} is no shard of labels of these traces: run kvsweep predictor labels again.")
    file: Any = safe_open(path, framework="pt")
    traces = []
    start = 0
    for length, problem_id in zip(file.get_tensor("lengths").tolist(), about["problems"], strict=True):
        traces.append(StoredTrace(file, slice(start, start + length), is_held_out(recipe, problem_id)))
        start += length
    return traces


def is_held_out(recipe: Recipe, problem_id: str) -> bool:
    if recipe.held_out is None:
        return False
    return int(hashlib.sha256(problem_id.encode()).hexdigest(), 16) % recipe.held_out == 0


def open_shards(recipe: Recipe, manifest: Mapping[str, Any]) -> Iterator[StoredTrace]:
    """Yield the places of all traces, in their order; one shard is open at a time."""
    for number in range(manifest["shards"]):
        yield from open_shard(recipe, manifest, number)


def make_oracle(settings: PredictorSettings) -> dict[str, Any]:
    """Write the traces' tokens and targets to the file that the policy `oracle` reads."""
    recipe, traces = settings.recipe, read_traces(settings)
    manifest = read_manifest(settings, recipe.manifest, "labels")
    if manifest["data"] != data_hash(traces):
        raise UserError(f"{recipe.out} holds labels of other traces: run kvsweep predictor labels first.")
    lead = manifest.get("lead", 0)
    targets = {}
    for trace, stored in zip(traces, open_shards(recipe, manifest), strict=True):
        _, labels = stored.read()
        scores = torch.full((len(trace.token_ids),), torch.nan)
        # Labels begin `lead` tokens before the thinking.
        scores[trace.think_start : trace.think_end] = target(labels, recipe.label, recipe.target)[lead:]
        targets[f"{trace.problem_id}/{trace.draw}"] = torch.tensor(trace.token_ids), scores
    path = recipe.out / f"oracle_{'_'.join(recipe.label)}.safetensors"
    card = {"hidden_size": manifest["hidden_size"], "model_weights": manifest["model"]["weights"]}
    save_labels(str(path), targets, {**card, "label": recipe.label})
    return {"labels": str(path)}


def target(labels: Labels, kinds: Sequence[LabelKind], scale: Target | None = "standardised") -> Tensor:
    """Return what a head learns of a trace's labels, [T]; NaN where a label is missing.

    `standardised` is the sum of the kinds of labels, each standardised, scaled to 0 to 1. The code of DynTS
    (Robin930/DynTS a55dc37, verl_sft_fsdp.py 1390-1410) scales the mean attention x of one kind, alike in all traces:
    10 / 0.3 * x ** 0.3 (`power`) for R1-Distill-Qwen-7B, and 10,000 * x (`linear`) for R1-Distill-Llama-8B.
    """
    if scale == "standardised":
        standardised = [standardise(labels[kind].float()) for kind in kinds]
        return standardise(torch.stack(standardised).sum(dim=0))
    [kind] = kinds
    if scale == "linear":
        return labels[kind] * 10_000
    return labels[kind] ** 0.3 / 0.3 * 10


def standardise(label: Tensor) -> Tensor:
    """Shift and scale one trace's label to 0 to 1. NaN stays; a constant label becomes 0."""
    numbers = label[~label.isnan()]
    if not len(numbers):
        return label
    return (label - numbers.min()) / (numbers.max() - numbers.min()).clamp(min=1e-12)
