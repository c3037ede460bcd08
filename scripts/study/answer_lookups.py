"""Why policies rank as they do: of the rows that the answer looks up, how many does the first eviction leave?

    python scripts/study/answer_lookups.py --model toy_qwen --problems 20

Completions with the full cache are attended once more, whole. A look-up is a (layer, key head, token) that a query of
the answer gives more than half of its attention, among the tokens after the question and before the newest 48 where
the first eviction of experiment=methods_on_top fires. Each policy's share of look-ups kept is printed beside the share
of those tokens that it keeps at all: what chance would find. The last line is one JSON object.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvsweep.compression.policy import CacheView, Policy, Selection
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import Job, make_job

BENCHMARKS = ("toy_chain", "toy_add", "toy_regs", "toy_groups")
CERTAIN = 0.5


class FirstSelections(Engine):
    """Remembers which positions each branch kept at its first eviction, [layers, kv_heads, kept]."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.first: dict[tuple[str, str], Tensor] = {}

    def _evict(self, slot: int) -> None:
        sequence = self.table[slot]
        shape = (self.model.shape.layers, self.model.shape.kv_heads, -1)
        view: CacheView = self._view(slot, sequence)
        selection: Selection = sequence.branches[0].policy.select(view)
        kept = view.positions.expand(shape).gather(-1, selection.keep.expand(shape))
        self.first.setdefault((sequence.branches[0].cell_id, sequence.request.problem_id), kept)
        super()._evict(slot)


def main() -> None:
    args = parse_args()
    model, counts = None, defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for benchmark in BENCHMARKS:
        overrides = ["experiment=methods_on_top", f"model={args.model}", f"benchmark={benchmark}"]
        overrides += [f"benchmark.limit={args.problems}", "grid.keep_ratio=[0.3]"]
        job = make_job(compose_config(*overrides))
        model = model or load_model(job.model)
        for name, *figures in compare(job, model):
            counts[name] = [a + b for a, b in zip(counts[name], figures, strict=True)]
    shares = {name: (kept / ups, rows / of) for name, (kept, ups, rows, of) in counts.items()}
    print(f"{'policy':20}{'look-ups kept':>15}{'tokens kept':>13}")
    for name, (found, chance) in sorted(shares.items(), key=lambda item: -item[1][0]):
        print(f"{name:20}{found:15.3f}{chance:13.3f}")
    print(json.dumps({**vars(args), "look_ups": next(iter(counts.values()))[1], "shares": shares}))


def compare(job: Job, model: LoadedModel) -> Iterator[tuple[str, float, float, float, float]]:
    """Per policy and problem: look-ups kept, look-ups, tokens kept, tokens to choose from."""
    eager = AutoModelForCausalLM.from_pretrained(
        job.model.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    branches = tuple(Branch(cell_id=cell.policy.name, policy=cell.policy) for cell in job.cells)
    policies: list[Policy] = [branch.policy for branch in branches]
    prompts = {p.id: model.dialogue.prompt_ids(p.prompt) for p in job.benchmark.problems}
    requests = [Request(problem_id=i, draw=0, prompt_ids=ids, branches=branches) for i, ids in prompts.items()]
    engine = FirstSelections.sized_for(requests, model, decoding=job.decoding, seed=job.seed)
    texts = {c.problem_id: c.token_ids for cell, c in engine.generate(requests) if cell == "full"}
    window = next(p.local_window for p in policies if hasattr(p, "local_window"))
    for problem, ids in prompts.items():
        length = policies[-1].trigger(len(ids)) + 1
        closing = model.dialogue.closing_tag(texts[problem])
        if closing is None or len(ids) + closing.start <= length:  # no answer, or one that began before the eviction
            continue
        looked_up = look_ups(eager, model, ids, texts[problem], closing)[..., len(ids) : length - window]
        for name in (p.name for p in policies):
            if (name, problem) not in engine.first:
                continue
            kept = torch.zeros(*looked_up.shape[:2], len(ids) + len(texts[problem]))
            kept = kept.scatter(-1, engine.first[name, problem], 1.0)[..., len(ids) : length - window]
            yield name, float((kept * looked_up).sum()), float(looked_up.sum()), float(kept.sum()), float(kept.numel())


@torch.inference_mode()
def look_ups(eager, model: LoadedModel, prompt: tuple[int, ...], text: list[int], closing: range) -> Tensor:
    """[layers, kv_heads, tokens] 1 where some query of the answer pays more than half of its attention."""
    answer = len(prompt) + closing.start
    attentions = eager(torch.tensor([[*prompt, *text]]), output_attentions=True).attentions
    largest = torch.stack(attentions)[:, 0, :, answer:].amax(dim=2)  # [layers, q_heads, tokens]
    return (largest.unflatten(1, (model.shape.kv_heads, -1)).amax(dim=2) > CERTAIN).float()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="toy_qwen")
    parser.add_argument("--problems", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
