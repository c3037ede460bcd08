#!/usr/bin/env python
r"""Train a toy model from scratch on the toy tasks, on one CPU core in about half an hour.

    python scripts/train/train_toy_models.py --arch qwen  --out harness/toy/weights/toy_qwen
    python scripts/train/train_toy_models.py --arch llama --out harness/toy/weights/toy_llama
    python scripts/train/train_toy_models.py --arch qwen_windows --out harness/toy/weights/toy_qwen_windows \
        --start harness/toy/weights/toy_qwen --tokens 600000 --lr 1e-3 --ramp 0.2
    python scripts/train/train_toy_models.py --arch qwen --out harness/toy/weights/toy_qwen_restated \
        --start harness/toy/weights/toy_qwen --tasks chain,add,regs,groups,restated \
        --tokens 6000000 --lr 1e-3 --ramp 0.2

The work folder keeps a checkpoint, from which the same command goes on. All random numbers follow from --seed.
"""

import argparse
import copy
import json
import math
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvsweep.harness.toy.tasks import TASKS, ToyProblem, training_problems
from scripts.train.toy_completions import write_completion
from scripts.train.toy_tokenizer import MAX_LENGTH, build_tokenizer

ToyModel = Qwen2ForCausalLM | LlamaForCausalLM

VOCAB_SIZE = 128
POOL_EXAMPLES = 384
GENERATE_BATCH = 128
ANSWER_WEIGHT = 3.0
WARMUP_STEPS = 100
TASK_NAMES = ["chain", "add", "regs", "groups"]
# A step of the thinking takes 25 to 40 tokens: a window sees about one, and older facts come through full layers alone.
WINDOWS = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 32,
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids of prompt + completion + <eos>, and where the completion and the answer begin."""

    ids: list[int]
    prompt_length: int
    answer_start: int


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def new_model(arch: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> ToyModel:
    """A model with random weights, of 0.6 to 0.8 million parameters, in fp32."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
        **special_tokens(tokenizer),
    }
    torch.manual_seed(seed)
    if arch == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return Qwen2ForCausalLM(Qwen2Config(**shape | (WINDOWS if arch == "qwen_windows" else {})))


def grown(trained: dict[str, torch.Tensor], model: ToyModel) -> dict[str, torch.Tensor]:
    """The weights of a trained model of three layers for one of four, whose second layer adds nothing at first."""
    weights = model.state_dict()
    for name, value in weights.items():
        if ".layers.1." not in name:
            source = re.sub(r"layers\.([23])", lambda found: f"layers.{int(found[1]) - 1}", name)
            weights[name] = trained[source]
        elif "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(value)
    return weights


def prompt_ids(problem: ToyProblem, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The chat prompt of a problem, up to and with the opening <think>."""
    chat = [{"role": "user", "content": problem.question}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def make_example(task: str, problem: ToyProblem, tokenizer: PreTrainedTokenizerFast, rng: Random) -> Example:
    prompt = prompt_ids(problem, tokenizer)
    completion = tokenizer.encode(write_completion(task, problem.question, rng), add_special_tokens=False)
    think_end = completion.index(tokenizer.convert_tokens_to_ids("</think>"))
    return Example(
        ids=[*prompt, *completion, tokenizer.eos_token_id],
        prompt_length=len(prompt),
        answer_start=len(prompt) + think_end + 1,
    )


def sizes_at(sizes: Sequence[int], progress: float, ramp: float) -> Sequence[int]:
    """The sizes to teach at a share of the training: the smallest two at first, all sizes from `ramp` on."""
    if progress >= ramp:
        return sizes
    return sizes[: 2 + math.floor(progress / ramp * (len(sizes) - 1))]


def pool_batches(
    pool: int, progress: float, args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> list[list[Example]]:
    """The batches of a pool of examples: a batch holds similar lengths and at most `batch_tokens` padded tokens."""
    rng = Random(f"kvsweep-toy-train-{args.seed}-{pool}")
    examples = []
    for task in args.tasks:
        stream = training_problems(task, rng, sizes_at(TASKS[task].train_sizes, progress, args.ramp))
        for _ in range(POOL_EXAMPLES // len(args.tasks)):
            examples.append(make_example(task, next(stream), tokenizer, rng))
    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        longest = len(batches[-1][0].ids) if batches[-1] else len(example.ids)
        if longest * (len(batches[-1]) + 1) > args.batch_tokens:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    return batches


def collate(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids [B, S] and the loss weight of each token as a target [B, S]."""
    longest = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), longest), pad)
    weight = torch.zeros(len(batch), longest)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weight[row, example.prompt_length : len(example.ids)] = 1.0
        weight[row, example.answer_start : len(example.ids)] = ANSWER_WEIGHT
    return ids, weight


def completion_loss(model: ToyModel, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # Padding lies to the right, where a causal model does not look, so no attention mask is needed.
    logits = model(ids[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    target_weight = weight[:, 1:].flatten()
    return (losses * target_weight).sum() / target_weight.sum()


def learning_rate(step: int, progress: float, peak: float) -> float:
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return peak * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@torch.inference_mode()
def accuracy(
    model: ToyModel, tokenizer: PreTrainedTokenizerFast, tasks: Sequence[str], count: int, seed: int
) -> dict[str, dict[int, float]]:
    """Share of right answers at T=0.6, top-p 0.95, per task and size, on fresh training problems."""
    model.eval()
    torch.manual_seed(seed)
    result: dict[str, dict[int, float]] = {}
    for task in tasks:
        sizes = TASKS[task].train_sizes[len(TASKS[task].train_sizes) // 3 :]
        problems: list[ToyProblem] = []
        for size in sizes:
            stream = training_problems(task, Random(f"kvsweep-toy-dev-{seed}-{task}-{size}"), [size])
            problems += [next(stream) for _ in range(count)]
        texts: list[str] = []
        for start in range(0, len(problems), GENERATE_BATCH):
            texts += generate(model, tokenizer, problems[start : start + GENERATE_BATCH])
        right = dict.fromkeys(sizes, 0)
        for problem, text in zip(problems, texts, strict=True):
            right[problem.size] += f"\\boxed{{{problem.answer}}}" in text
        result[task] = {size: round(hits / count, 3) for size, hits in right.items()}
    model.train()
    return result


def generate(model: ToyModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[ToyProblem]) -> list[str]:
    """Completions drawn at T=0.6, top-p 0.95, as texts."""
    prompts = [tokenizer.decode(prompt_ids(problem, tokenizer)) for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    output = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=600,
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=0,
    )
    return tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


class Training:
    """The state that a checkpoint holds, and the loop over pools that advances this state."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = build_tokenizer()
        self.model = new_model(args.arch, self.tokenizer, args.seed)
        if args.start:
            trained = type(self.model).from_pretrained(args.start, dtype=torch.float32)
            weights = trained.state_dict()
            self.model.load_state_dict(grown(weights, self.model) if args.arch == "qwen_windows" else weights)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True
        )
        self.pool = self.step = self.tokens = 0
        self.seconds = 0.0
        self.loss = math.nan
        args.work.mkdir(parents=True, exist_ok=True)
        self.checkpoint = args.work / "checkpoint.pt"
        self.log = args.work / "log.jsonl"
        if self.checkpoint.exists():
            self.resume()
        else:
            self.log.unlink(missing_ok=True)

    @property
    def progress(self) -> float:
        return self.tokens / self.args.tokens

    def resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("pool", "step", "tokens", "seconds", "loss"):
            setattr(self, name, state[name])
        rows = [line for line in self.log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
        self.log.write_text("".join(f"{row}\n" for row in rows))

    def save_checkpoint(self) -> None:
        state = {name: getattr(self, name) for name in ("pool", "step", "tokens", "seconds", "loss")}
        state["model"] = self.model.state_dict()
        state["optimizer"] = self.optimizer.state_dict()
        partial = self.checkpoint.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def write_log(self, **fields: object) -> None:
        row = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1), **fields}
        with self.log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def train_pool(self) -> None:
        started = time.perf_counter()
        losses = []
        for batch in pool_batches(self.pool, self.progress, self.args, self.tokenizer):
            ids, weight = collate(batch, self.tokenizer.pad_token_id)
            rate = learning_rate(self.step, self.progress, self.args.lr)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = completion_loss(self.model, ids, weight)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            self.step += 1
            self.tokens += ids.numel()
        self.pool += 1
        self.loss = sum(losses) / len(losses)
        self.seconds += time.perf_counter() - started
        self.write_log(loss=round(self.loss, 4), lr=round(rate, 6))

    def run(self) -> None:
        self.model.train()
        next_eval = self.progress + self.args.eval_every
        while self.progress < 1 and self.pool < self.args.max_pools:
            self.train_pool()
            self.save_checkpoint()
            if self.progress >= next_eval:
                self.write_log(accuracy=accuracy(self.model, self.tokenizer, self.args.tasks, 8, seed=1))
                next_eval += self.args.eval_every
        self.save_checkpoint()

    def command_line(self) -> str:
        """The command that makes this model again, without the folder of the checkpoint."""
        options = {name: getattr(self.args, name) for name in ("arch", "out", "seed", "tokens")}
        if self.args.start:
            options |= {"start": self.args.start, "lr": self.args.lr, "ramp": self.args.ramp}
        if self.args.tasks != TASK_NAMES:
            options["tasks"] = ",".join(self.args.tasks)
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return f"python scripts/train/{Path(__file__).name} {shlex.join(words)}"

    def save(self) -> None:
        """Write the directory that `from_pretrained` reads, with bf16 weights and a record of the training."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        # A copy, because the cast also rounds the rotary frequencies, and no cast back restores them.
        rounded = copy.deepcopy(self.model).to(torch.bfloat16)
        rounded.generation_config = GenerationConfig(
            **special_tokens(self.tokenizer), do_sample=True, temperature=0.6, top_p=0.95
        )
        rounded.save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        saved = type(self.model).from_pretrained(out, dtype=torch.float32)
        final = accuracy(saved, self.tokenizer, self.args.tasks, self.args.final_count, seed=2)
        shutil.copy(self.log, out / "training_log.jsonl")
        versions = {"python": platform.python_version()}
        versions |= {module.__name__: module.__version__ for module in (torch, transformers)}
        record = {
            "command": self.command_line(),
            "arch": self.args.arch,
            "seed": self.args.seed,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "tokens": self.tokens,
            "steps": self.step,
            "train_seconds": round(self.seconds),
            "final_loss": round(self.loss, 4),
            "train_sizes": {
                task: f"{TASKS[task].train_sizes[0]}-{TASKS[task].train_sizes[-1]}" for task in self.args.tasks
            },
            "accuracy_by_size": final,
            "versions": versions,
        }
        (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=("qwen", "llama", "qwen_windows"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory of the finished model")
    parser.add_argument("--work", type=Path, help="folder of checkpoint and log; default: OUT.work")
    parser.add_argument("--start", type=Path, help="trained model to start from; default: random weights")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=TASK_NAMES, help="tasks, with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=17_000_000, help="padded tokens to train on")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--ramp", type=float, default=0.35, help="share of training to reach all sizes")
    parser.add_argument("--eval-every", type=float, default=0.2, help="share of training between evaluations")
    parser.add_argument("--final-count", type=int, default=64, help="problems per task and size at the end")
    parser.add_argument("--max-pools", type=int, default=sys.maxsize, help="stop early, for a trial")
    args = parser.parse_args(argv)
    args.work = args.work or args.out.with_name(args.out.name + ".work")
    return args


def main() -> None:
    torch.set_num_threads(1)
    training = Training(parse_args())
    training.run()
    if training.progress >= 1:
        training.save()


if __name__ == "__main__":
    main()
