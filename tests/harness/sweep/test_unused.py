"""A setting that no job uses is refused; one that some job uses is not."""

import re

import pytest

from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.unused import refuse_unused, unused_settings
from kvsweep.messages.errors import UserError

TOY = ("model=toy_qwen", "benchmark=toy_add")


def refuse(*jobs: list[str]):
    configs = [compose_config(*TOY, *words) for words in jobs]
    refuse_unused([word for words in jobs for word in words], [unused_settings(c, make_job(c)) for c in configs])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("grid.policy=[full,h2o] policy.predictor=DIR", "no policy of the job (full, h2o)"),
        ("grid.policy=[full] grid.keep_ratio=[0.3,0.4]", "no policy of the grid (full) takes it"),
        ("policy=full cache.group=16", "no row is packed"),
        ("policy=full cache.scheme=fp8 cache.residual=4", "cache.scheme=fp8 does not take it"),
        ("policy=full cache.key_bits=8 cache.value_bits=2 cache.bits=4", "cache.key_bits and"),
        ("policy=full cache.bits=4 cache.format=e5m2", "cache.scheme=rotated does not take it"),
        ("grid.keep_ratio=[0.3,0.4] policy.keep_ratio=0.5", "grid.keep_ratio gives the values"),
        ("grid.policy=[full,dynts] policy=h2o", "grid.policy gives the values"),
        (
            "grid.policy=[full,dynts] grid.beside=[{policy:[h2o]}] policy=h2o",
            "grid.policy gives the values: leave it out, or write 'grid.policy=[h2o]'.",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(words, reason):
    with pytest.raises(UserError, match=re.escape(f"{words.split()[-1]} has no effect, because {reason}")):
        refuse(words.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("grid.policy=[full] policy.budget=24", "no policy of the job (full) takes it"),
        ("report.margin=3", "until=decided alone uses it, and kvsweep report has --margin"),
    ],
)
def test_a_size_without_effect_is_named(words, reason, capsys):
    refuse(words.split())
    assert f"note: {words.split()[-1]} has no effect, because {reason}.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "policy=snapkv policy.observation_window=8",
        "policy=h2o grid.keep_ratio=[0.3,0.4]",
        "grid.policy=[full,dynts] policy=h2o grid.beside=[{keep_ratio:[0.3]}]",
        "policy=h2o grid.policy=[full,h2o] policy.keep_ratio=0.4 policy.question=pinned",
        "grid.policy=[full,dynts] grid.keep_ratio=[0.3,0.4]",
        "policy.local_window=32 grid.keep_ratio=[0.3,0.4]",
        "policy.keep_ratio=0.5 grid.keep_ratio=[0.3] grid.beside=[{policy:[h2o]}]",
        "policy=full cache.bits=4 cache.group=16",
        "policy=full cache.scheme=fp8 cache.scale=token",
        "grid.policy=[full,dynts] until=decided draws=4 report.margin=3",
    ],
)
def test_a_setting_that_a_policy_takes_is_not(words):
    refuse(words.split())


def test_one_job_of_several_may_leave_a_setting_unused():
    refuse(["policy=snapkv", "policy.observation_window=8"], ["policy=h2o"])
