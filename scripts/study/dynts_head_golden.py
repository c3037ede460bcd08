"""Numbers of DynTS's head training by its authors' own functions, in tests/harness/predictor/dynts_head.npz.

    pip install --no-deps --target LIBRARY transformers==4.54.1 tokenizers==0.21.4 huggingface_hub==0.34.4
    PYTHONPATH=LIBRARY python scripts/study/dynts_head_golden.py DYNTS VERL tests/harness/predictor/dynts_head.npz

DYNTS is a checkout of Robin930/DynTS at a55dc37, VERL one of volcengine/verl at v0.4.1 (8d9e350), its trainer. The
script calls verl_sft_fsdp.py (SFTDataset, Trainer.process_batch, _compute_loss_and_backward, _load_optimizer, train),
models/qwen.py, models/llama.py, models/utils.py (freeze_model), recipes/configs/sft_trainer.yaml, and verl's
_normalize_config_bsz, _build_dataloader, training_step, fsdp2_clip_grad_norm_ and get_cosine_schedule_with_warmup.

Ours are three things. Imports that these functions do not use are empty modules. Their torch.bfloat16 is float32 and
their autocast does nothing, so that all numbers are float32 (but for `targets_bfloat16`). Models are random and tiny;
in the training the head is 8, 16, 4, 1 wide, and torch's fully_shard shards it over two processes on the CPU.
"""

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

MODELS = {
    "qwen": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "llama": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
}
EMPTY = (
    "codetiming datasets flash_attn models.exaone models.phi peft pkg_resources qw_evaluation ray tensordict "
    "verl.protocol verl.utils.dataset verl.utils.profiler wandb"
)
STEPS_PER_EPOCH = 27  # checkpoint global_step_405 is that of 15 epochs
HIDDEN, WORDS = 8, 30
TRACES, RANKS, BATCH, EPOCHS, LR = 35, 2, 16, 6, 5e-3
Arrays = dict[str, np.ndarray]


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that cannot be imported here; each of their names is a mock."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == empty or name.startswith(f"{empty}.") for empty in EMPTY.split()):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class Float32Torch(types.ModuleType):
    """torch for the authors' module: bfloat16 is float32, autocast does nothing, `choices` keeps results of `where`."""

    bfloat16 = torch.float32

    def __init__(self) -> None:
        super().__init__("torch")
        self.choices: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def autocast(self, **how: Any) -> nullcontext[None]:
        return nullcontext()

    def where(self, condition: torch.Tensor, true: torch.Tensor, false: torch.Tensor) -> torch.Tensor:
        self.choices.append(torch.where(condition, true, false))
        return self.choices[-1]


class Batch(dict[str, torch.Tensor]):
    """What their trainer uses of a TensorDict."""

    def __init__(self, tensors: dict[str, torch.Tensor], batch_size: int = 0) -> None:
        super().__init__(tensors)

    def to(self, device: str) -> "Batch":
        return self

    def split(self, size: int) -> list["Batch"]:
        parts = {name: tensor.split(size) for name, tensor in self.items()}
        count = len(next(iter(parts.values())))
        return [Batch({name: part[number] for name, part in parts.items()}) for number in range(count)]


def authors(dynts: Path, verl: Path) -> Any:
    """Import their module verl_sft_fsdp, in float32."""
    sys.meta_path.insert(0, EmptyModules())
    sys.path[:0] = [str(dynts), str(verl)]
    import verl.trainer.fsdp_sft_trainer as trainer
    import verl_sft_fsdp as module

    module.torch = Float32Torch()
    module.TensorDict = Batch
    trainer.DataLoader = in_this_process(trainer.DataLoader)
    trainer.log_gpu_memory_usage = MagicMock()
    return module


def in_this_process(loader: Callable[..., Any]) -> Callable[..., Any]:
    def load(**how: Any) -> Any:
        return loader(**{**how, "num_workers": 0, "pin_memory": False})

    return load


def released_config(dynts: Path, model: str) -> DictConfig:
    """Return their YAML with the overrides of recipes/sft/sft_deepseek_{qwen,llama}.sh, which are alike."""
    config = OmegaConf.load(dynts / "recipes/configs/sft_trainer.yaml")
    assert isinstance(config, DictConfig)
    config.model.model_name_or_path = MODELS[model]
    config.optim.lr = 5e-4
    config.trainer.update({"alpha": 1, "head_type": "regression", "pruning_ratio": 0, "total_epochs": 15, "ktl": True})
    return config


def trainer_of(module: Any, config: DictConfig, rank: int = 0, ranks: int = 1) -> Any:
    """Return their trainer without what its __init__ loads."""
    trainer = module.Trainer.__new__(module.Trainer)
    mesh = types.SimpleNamespace(get_rank=lambda: rank, size=lambda *axis: ranks)
    trainer.config, trainer.device_mesh, trainer.ulysses_device_mesh = config, mesh, mesh
    trainer.use_remove_padding, trainer.device_name = False, "cpu"
    trainer.tokenizer = tokenizer()
    return trainer


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words; their code looks for the tags in its tokens."""
    words = ["<pad>", "<think>", "</think>", "Ċ", *(f"w{number}" for number in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


def small_model(module: Any, model: str, widths: Sequence[int]) -> Any:
    """Return their model class with random weights, one layer, and a head of the same form but these widths."""
    sizes = {"vocab_size": WORDS + 4, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    cls, config = classes(module)[model]
    made = cls(config(**sizes, **heads), head_type="regression").float()
    layers: list[nn.Module] = []
    for before, after in zip([HIDDEN, *widths], [*widths, 1], strict=True):
        linear = nn.Linear(before, after, bias=False)
        nn.init.normal_(linear.weight, std=0.3)
        layers += [linear, nn.Softplus()]
    assert [type(layer) for layer in layers] == [type(layer) for layer in made.is_head]
    made.is_head = nn.Sequential(*layers)
    return module.freeze_model(made, "is_head")


def classes(module: Any) -> dict[str, tuple[Any, Any]]:
    return {"qwen": (module.myQwen2ForCausalLM, Qwen2Config), "llama": (module.myLlamaForCausalLM, LlamaConfig)}


def random_rows(rng: np.random.Generator, lengths: Sequence[int], top: float) -> list[dict[str, Any]]:
    """Return texts with thinking of these lengths, and an importance of up to `top` for each token."""
    rows = []
    for length in lengths:
        question, answer = rng.integers(4, 9, size=2)
        words = [f"w{number}" for number in rng.integers(WORDS, size=question + length + answer)]
        thinking = [*words[:question], "<think>", "Ċ", *words[question : question + length], "</think>"]
        tokens = [*thinking, *words[question + length :]]
        importance = np.float32(top * 10 ** rng.uniform(-3, 0, size=len(tokens)))
        rows.append({"texts": " ".join(tokens), "importance_score": importance.tolist()})
    return rows


def dataset(module: Any, rows: list[dict[str, Any]]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return module.SFTDataset(str(path))


def of_one_micro_batch(module: Any, dynts: Path, model: str) -> Arrays:
    """Return targets, mask, weights, loss and gradient norm of three traces."""
    rows = random_rows(np.random.default_rng(1), (29, 57, 93), top=5e-3 if model == "qwen" else 1e-3)
    trainer = trainer_of(module, released_config(dynts, model))
    torch.manual_seed(1)
    trainer.fsdp_model = small_model(module, model, (16, 4))
    found = dataset(module, rows)
    texts = [row["texts"] for row in rows]
    importance = torch.stack([found[number]["importance_score"] for number in range(len(found))])
    batch = Batch(trainer.process_batch({"texts": texts, "importance_score": importance}))
    rounded = trainer.process_batch({"texts": texts, "importance_score": importance.bfloat16()})
    hidden = trainer.fsdp_model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    module.torch.choices.clear()
    loss = trainer._compute_loss_and_backward(batch)
    head = list(trainer.fsdp_model.is_head.parameters())
    norm = nn.utils.clip_grad_norm_(head, trainer.config.optim.clip_grad)
    arrays = {
        "ids": batch["input_ids"].to(torch.uint8),
        "importance": importance[:, : batch["input_ids"].shape[1]],
        "targets": batch["importance_scores"],
        "targets_bfloat16": rounded["importance_scores"].float(),
        "mask": batch["is_mask"].to(torch.uint8),
        "weights": module.torch.choices[-1].to(torch.uint8),
        "hidden": hidden.detach(),
        "loss": loss.detach(),
        "norm": norm,
    }
    arrays |= {f"head.{number}": weight.detach() for number, weight in enumerate(head)}
    arrays |= {f"clipped.{number}": weight.grad for number, weight in enumerate(head)}
    return {f"{model}.{name}": array.numpy() for name, array in arrays.items()}


def schedule(module: Any, dynts: Path) -> Arrays:
    """Return the learning rate of each of the released steps, and the numbers of their optimizer."""
    trainer = trainer_of(module, released_config(dynts, "qwen"))
    trainer.fsdp_model = nn.Linear(2, 1)
    trainer.train_dataloader = range(STEPS_PER_EPOCH)
    trainer._load_optimizer()
    rates = []
    for _ in range(trainer.total_steps):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    group = trainer.optimizer.param_groups[0]
    numbers = [*group["betas"], group["eps"], group["weight_decay"], trainer.config.optim.clip_grad]
    return {"rates": np.array(rates), "optimizer": np.array(numbers)}


def order(module: Any, dynts: Path) -> Arrays:
    """Return the traces of each micro-batch: [epochs, steps, ranks, micro-batches, 4] of 1,030 traces."""
    ranks = []
    for rank in range(4):
        trainer = trainer_of(module, released_config(dynts, "qwen"), rank, 4)
        trainer._normalize_config_bsz()
        trainer._build_dataloader(range(1030), range(4))
        epochs = []
        for epoch in range(2):
            trainer.train_sampler.set_epoch(epoch=epoch)
            steps = torch.stack(list(trainer.train_dataloader))
            epochs.append(steps.view(len(steps), -1, trainer.config.data.micro_batch_size_per_gpu))
        ranks.append(torch.stack(epochs))
    return {"order": torch.stack(ranks, dim=2).numpy().astype(np.int16)}


def first_weights(module: Any) -> Arrays:
    """Return widths and first weights' mean, spread and share within a spread, from checkpoints without a head."""
    found: Arrays = {}
    torch.manual_seed(3)
    for model, (cls, config) in classes(module).items():
        for spread in (0.02, 0.05):
            sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
            made = cls(config(**sizes, **heads, initializer_range=spread), head_type="regression")
            with tempfile.TemporaryDirectory() as folder:
                state = {name: tensor for name, tensor in made.state_dict().items() if "is_head" not in name}
                made.save_pretrained(folder, state_dict=state)
                made = cls.from_pretrained(folder, head_type="regression", torch_dtype=torch.float32)
            weights = [weight.detach() for weight in made.is_head.parameters()]
            within = [float((weight.abs() < spread).float().mean()) for weight in weights]
            numbers = [[float(w.mean()), float(w.std()), share] for w, share in zip(weights, within, strict=True)]
            found[f"{model}.first_weights.{spread}"] = np.array(numbers, dtype=np.float32)
        found[f"{model}.widths"] = np.array([weight.shape for weight in weights], dtype=np.int32)
        found[f"{model}.default_spread"] = np.array(config().initializer_range)
    return found


def train(rank: int, dynts: Path, verl: Path, output: Path) -> None:
    """Run their training of some steps as one of two processes; the first writes what came out."""
    module = authors(dynts, verl)
    import verl.trainer.fsdp_sft_trainer as trainer_module

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK=str(rank), WORLD_SIZE=str(RANKS))
    distributed.init_process_group("gloo")
    rng = np.random.default_rng(2)
    rows = random_rows(rng, rng.integers(20, 70, size=TRACES).tolist(), top=5e-3)
    config = released_config(dynts, "qwen")
    config.data.train_batch_size, config.optim.lr, config.trainer.total_epochs = BATCH, LR, EPOCHS
    trainer = trainer_of(module, config, rank, RANKS)
    torch.manual_seed(2)
    model = small_model(module, "qwen", (16, 4))
    arrays = {f"train.first.{n}": w.detach().clone() for n, w in enumerate(model.is_head.parameters())}
    arrays |= stored_traces(trainer, model, dataset(module, rows))
    trainer.fsdp_model = fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    trainer._normalize_config_bsz()
    trainer._build_dataloader(dataset(module, rows), dataset(module, rows))
    trainer._load_optimizer()
    trainer.save_checkpoint = MagicMock()
    with recorded(module, trainer_module) as (losses, norms):
        trainer.train()
    trainer.fsdp_model.reshard()  # their validation leaves the weights whole
    arrays |= {f"train.last.{n}": w.full_tensor().detach() for n, w in enumerate(model.is_head.parameters())}
    arrays |= {"train.losses": torch.tensor(losses), "train.norms": torch.stack(norms)}
    whole: list[Any] = [None] * RANKS
    distributed.all_gather_object(whole, losses)
    arrays["train.losses"] = torch.tensor(whole).mean(dim=0)  # on a GPU their training_step takes this mean itself
    if rank == 0:
        np.savez(output, **{name: array.numpy() for name, array in arrays.items()})
    distributed.destroy_process_group()


@contextmanager
def recorded(module: Any, trainer_module: Any) -> Iterator[tuple[list[float], list[torch.Tensor]]]:
    """Record the loss that each step of this process returns, and the norm that it clips."""
    losses: list[float] = []
    norms: list[torch.Tensor] = []
    step, clip = trainer_module.FSDPSFTTrainer.training_step, trainer_module.fsdp2_clip_grad_norm_

    def recorded_step(self: Any, batch: Batch) -> dict[str, float]:
        metric: dict[str, float] = step(self, batch)
        losses.append(metric["train/loss"])
        return metric

    def recorded_clip(*arguments: Any, **how: Any) -> torch.Tensor:
        norm: Any = clip(*arguments, **how)
        norms.append(norm.full_tensor())
        return norm

    trainer_module.FSDPSFTTrainer.training_step = recorded_step
    trainer_module.fsdp2_clip_grad_norm_ = recorded_clip
    module.Tracking = MagicMock()
    yield losses, norms


@torch.no_grad()
def stored_traces(trainer: Any, model: Any, rows: Any) -> dict[str, torch.Tensor]:
    """Return the trained tokens' hidden states and importances of all traces, one behind another."""
    hidden, importance = [], []
    for row in (rows[number] for number in range(len(rows))):
        batch = trainer.process_batch({"texts": [row["texts"]], "importance_score": row["importance_score"][None]})
        trained = batch["is_mask"][0].bool()
        hidden.append(model.model(batch["input_ids"]).last_hidden_state[0, trained])
        importance.append(row["importance_score"][: len(trained)][trained])
    lengths = torch.tensor([len(part) for part in importance])
    return {"train.hidden": torch.cat(hidden), "train.importance": torch.cat(importance), "train.lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dynts", type=Path)
    parser.add_argument("verl", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    module = authors(options.dynts, options.verl)
    arrays: dict[str, Any] = schedule(module, options.dynts) | order(module, options.dynts) | first_weights(module)
    for model in MODELS:
        arrays |= of_one_micro_batch(module, options.dynts, model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.npz"
        multiprocessing.spawn(train, (options.dynts, options.verl, path), nprocs=RANKS)
        arrays |= dict(np.load(path))
    about = {"repository": "Robin930/DynTS a55dc37", "trainer": "volcengine/verl v0.4.1", "batch": BATCH}
    about |= {"open_tag": 1, "close_tag": 2, "newline": 3, "ranks": RANKS, "epochs": EPOCHS, "lr": LR, "micro_batch": 4}
    arrays["about"] = np.array(json.dumps(about))
    np.savez_compressed(options.output, **arrays)
    print(f"{options.output}: {len(arrays)} arrays, {options.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
