"""LoRA adapters: the sum of weight and product, what identifies it, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from kvsweep.base.errors import UserError
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.toy.paths import WEIGHTS

TOY = ModelConfig(name="toy_llama", title="Toy", path=str(WEIGHTS / "toy_llama"), threads=1)
RANK, ALPHA = 3, 12
TARGETS = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def plain():
    return load_model(TOY)


@pytest.fixture
def adapter(plain, tmp_path: Path) -> Path:
    """An adapter of random factors for two projections of each layer, in the files that peft writes."""
    generator, factors = torch.Generator().manual_seed(1), {}
    for name, weight in plain.network.named_parameters():
        if name.removesuffix(".weight").endswith(TARGETS):
            for part, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                key = f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"
                factors[key] = 0.05 * torch.randn(shape, generator=generator)
    write(tmp_path, factors)
    return tmp_path


def write(folder: Path, factors: dict[str, torch.Tensor], **fields) -> None:
    card = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "lora_dropout": 0.0, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(card))
    save_file(factors, folder / "adapter_model.safetensors")


def factors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_the_sum_computes_what_the_two_branches_compute(plain, adapter: Path) -> None:
    """The definition of LoRA: each adapted projection adds alpha / r · B A x to its own output."""
    merged, factors = load_model(replace(TOY, adapter=str(adapter))), factors_of(adapter)
    ids = torch.arange(5, 25)[None]

    def branch(name: str):
        down, up = (factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")

        def added(module, inputs, output):
            return output + ALPHA / RANK * functional.linear(functional.linear(inputs[0], down), up)

        return added

    modules = dict(plain.network.named_modules())
    handles = [modules[n].register_forward_hook(branch(n)) for n in modules if n.endswith(TARGETS)]
    assert len(handles) == 2 * plain.spec.layers
    with torch.inference_mode():
        expected = plain.network(ids).logits
        for handle in handles:
            handle.remove()
        untouched = plain.network(ids).logits
        found = merged.network(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untouched).abs().max() > 0.1


def test_the_identity_is_that_of_weights_and_adapter(adapter: Path, tmp_path: Path) -> None:
    without, with_it = TOY.identity()["weights"], replace(TOY, adapter=str(adapter)).identity()["weights"]
    factors = factors_of(adapter)
    write(adapter, {name: 2 * value for name, value in factors.items()})
    doubled = replace(TOY, adapter=str(adapter)).identity()["weights"]
    write(adapter, factors, lora_alpha=2 * ALPHA)
    other_scale = replace(TOY, adapter=str(adapter)).identity()["weights"]
    assert len({without, with_it, doubled, other_scale}) == 4
    assert set(replace(TOY, adapter=str(adapter)).files()) > set(TOY.files())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, r"is no plain LoRA \(use_dora\)"),
        ({"use_rslora": True}, r"is no plain LoRA \(use_rslora\)"),
        ({"rank_pattern": {"q_proj": 8}}, r"is no plain LoRA \(rank_pattern\)"),
        ({"peft_type": "IA3"}, "is no plain LoRA"),
        ({"bias": "all"}, "is no plain LoRA"),
        ({"r": 0}, "which must be a whole number of at least 1"),
        ({"r": "three"}, "which must be a whole number of at least 1"),
    ],
)
def test_other_adapters_are_refused_before_anything_is_loaded(adapter: Path, fields: dict, said: str) -> None:
    write(adapter, factors_of(adapter), **fields)
    with pytest.raises(UserError, match=rf"model.adapter=\S+ .*{said}"):
        replace(TOY, adapter=str(adapter)).identity()


def test_a_place_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.adapter=\S+ holds no adapter: name a folder with adapter_config.json"):
        replace(TOY, adapter=str(tmp_path)).identity()


def test_random_weights_take_no_adapter(adapter: Path) -> None:
    with pytest.raises(UserError, match=r"model.adapter belongs to trained weights"):
        replace(TOY, adapter=str(adapter), random_weights=True)


@pytest.mark.parametrize("change", ["a weight more", "a factor less", "another shape"])
def test_an_adapter_of_another_model_is_refused(adapter: Path, change: str) -> None:
    factors = factors_of(adapter)
    first = sorted(factors)[0]
    if change == "a weight more":
        factors |= {f"base_model.model.no.lora_{part}.weight": torch.zeros(RANK, RANK) for part in "AB"}
    elif change == "a factor less":
        del factors[first]
    else:
        factors[first] = torch.zeros(RANK, 7)
    write(adapter, factors)
    with pytest.raises(UserError, match=r"model.adapter=\S+ (names weights that this model lacks|does not fit)"):
        load_model(replace(TOY, adapter=str(adapter)))
