"""The three calls of a notebook."""

import pytest

import kvsweep
from kvsweep.harness.settings import choices


def test_a_policy_of_the_package_comes_by_its_name() -> None:
    made = kvsweep.policy("h2o", keep_ratio=0.3, local_window=48, budget=128, question="on_top")
    assert (made.name, made.keep_ratio, made.local_window, made.budget, made.question) == (
        "h2o",
        0.3,
        48,
        128,
        "on_top",
    )
    assert type(made).__name__ == "H2O"
    assert kvsweep.policy("full").name == "full"
    with pytest.raises(kvsweep.UserError, match=r"policy.keep_ratio=2 is out of range"):
        kvsweep.policy("h2o", keep_ratio=2)
    with pytest.raises(kvsweep.UserError, match="policy=h20 is unknown: did you mean h2o"):
        kvsweep.policy("h20")


@pytest.mark.slow  # test_configs.py composes each
@pytest.mark.parametrize("name", sorted(choices("policy")))
def test_every_policy_comes_by_its_name(name: str) -> None:
    if name.startswith(("oracle", "dynts_", "triattention")) or name in ("bottom", "no_window"):
        return  # of a model's own files
    assert isinstance(kvsweep.policy(name), kvsweep.Policy)
