"""Peak extra memory of the label pass by length, beside the same forward without it; each in a process of its own.

    python scripts/bench_labels.py

A random Llama of 2 layers, hidden 256, 8 query and 2 key heads, float32. Extra is the peak resident size of the forward
with all three labels less that of the forward alone; `matrix` is what one layer's attention would take.
"""

import json
import resource
import subprocess
import sys

LENGTHS = (1024, 2048, 4096, 8192)
HEADS = 8


def main() -> None:
    if len(sys.argv) > 1:
        print(peak(int(sys.argv[1]), labelled=sys.argv[2] == "labels"))
        return
    rows = []
    print(f"{'tokens':>8}{'forward MiB':>14}{'labels MiB':>12}{'extra MiB':>11}{'matrix MiB':>12}")
    for length in LENGTHS:
        plain, labelled = (run(length, mode) for mode in ("forward", "labels"))
        matrix = HEADS * length**2 * 4 / 2**20
        rows.append(
            {"tokens": length, "forward": plain, "labels": labelled, "extra": labelled - plain, "matrix": matrix}
        )
        print(f"{length:8}{plain:14.0f}{labelled:12.0f}{labelled - plain:11.0f}{matrix:12.0f}", flush=True)
    print(json.dumps(rows))


def run(length: int, mode: str) -> float:
    command = [sys.executable, __file__, str(length), mode]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak(length: int, *, labelled: bool) -> float:
    """Peak resident MiB above that before the forward."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from compression.attention import use_slot_attention
    from harness.predictor.labels import LabelPass

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=2 * max(LENGTHS),
    )
    model = LlamaForCausalLM(config).eval()
    use_slot_attention(model)
    labels = LabelPass(answer_start=length - length // 8, min_distance=32) if labelled else None
    with torch.inference_mode():
        model.model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model.model(input_ids=torch.randint(0, 128, (1, length)), use_cache=False, prefill=labels)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    main()
