"""The three calls of a notebook."""

from dataclasses import dataclass

import pytest
from torch import Tensor

import kvsweep
from kvsweep.compression.policy import CacheView, PredictedImportance, Signal


def test_a_policy_of_the_package_comes_by_its_name():
    made = kvsweep.policy("h2o", keep_ratio=0.3, local_window=48, budget=128, question="on_top")
    sizes = (made.name, made.keep_ratio, made.local_window, made.budget, made.question)
    assert sizes == ("h2o", 0.3, 48, 128, "on_top")
    assert type(made).__name__ == "H2O"
    assert kvsweep.policy("full").name == "full"
    with pytest.raises(kvsweep.UserError, match=r"policy.keep_ratio=2 cannot be used"):
        kvsweep.policy("h2o", keep_ratio=2)
    with pytest.raises(kvsweep.UserError, match="policy=h20 is unknown: did you mean h2o"):
        kvsweep.policy("h20")


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("weights/mine", [], "model=weights/mine is unknown: Choose from"),
        ("toy_qwem", [], "model=toy_qwem is unknown: did you mean toy_qwen"),
        ("toy_qwen", ["path=mine"], "^path is not a setting: did you mean model.path or benchmark.path"),
        ("toy_qwen", ["model.dtype=float13"], "model.dtype"),
    ],
)
def test_a_mistake_is_one_sentence_without_the_errors_behind_it(name, overrides, said):
    with pytest.raises(kvsweep.UserError, match=said) as raised:
        kvsweep.load_model(name, *overrides)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["dynts", "triattention"])
def test_another_models_artifact_is_refused_as_in_a_sweep(name):
    model, sizes = kvsweep.load_model("toy_llama"), {"keep_ratio": 0.3, "local_window": 48, "budget": 128}
    with pytest.raises(kvsweep.UserError, match=r"was made for toy_qwen .*, but model=toy_llama is"):
        kvsweep.generate(model, kvsweep.policy(name, **sizes), ["1+1"], max_new_tokens=4)
    own = kvsweep.policy(name, "toy_llama", **sizes)
    assert len(kvsweep.generate(model, own, ["1+1"], max_new_tokens=4)) == 1


@dataclass(frozen=True, kw_only=True)
class ByHead(kvsweep.BudgetPolicy):
    """As docs/your_policy.md names a predictor: by the signal alone."""

    directory: str

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (PredictedImportance(self.directory),)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[self.signals[0]]


def test_a_signals_predictor_of_another_model_is_refused():
    mine = ByHead(name="mine", keep_ratio=0.3, local_window=48, budget=128, directory=kvsweep.policy("dynts").predictor)
    with pytest.raises(kvsweep.UserError, match=r"was made for toy_qwen .*, but model=toy_llama is"):
        kvsweep.generate(kvsweep.load_model("toy_llama"), mine, ["1+1"], max_new_tokens=4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": "1+1"}, "prompts='1\\+1' cannot be used: input should be a valid list"),
        ({"prompts": [{"role": "user", "content": "1+1"}]}, "prompts.0={'role'.*: input should be a valid string"),
        ({"policy": "h2o"}, "policy='h2o' cannot be used: input should be an instance of Policy"),
        ({"cache": {"bits": 4}}, "cache={'bits': 4} cannot be used: input should be an instance of CacheConfig"),
        ({"seed": 1.5}, "seed=1.5 cannot be used"),
        ({"slots": 0}, "slots=0 cannot be used"),
        ({"impl": "cuda"}, "impl=cuda is unknown"),
        ({"temperature": -1}, "temperature=-1"),
    ],
)
def test_an_argument_of_another_type_is_one_sentence(change, said):
    model = kvsweep.load_model("toy_llama")
    arguments = {"policy": kvsweep.policy("full"), "prompts": ["1+1"], "max_new_tokens": 4}
    with pytest.raises(kvsweep.UserError, match=said):
        kvsweep.generate(model, **{**arguments, **change})
    assert kvsweep.generate(model, **{**arguments, "prompts": []}) == []
    assert len(kvsweep.generate(model, **{**arguments, "prompts": iter(["1+1"])})) == 1
