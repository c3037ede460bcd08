"""A name that is mistyped is answered with the nearest one that there is."""

import pytest


@pytest.mark.parametrize(
    ("mistake", "answer"),
    [
        ("policy.keep_rato=0.3", "policy.keep_rato is not a setting: did you mean policy.keep_ratio?"),
        ("modl=toy_qwen", "modl is not a setting: did you mean model?"),
        ("model.think_ned=null", "model.think_ned is not a setting: did you mean model.think_end?"),
        ("+policy.keep_rato=0.3", "policy.keep_rato is not a setting: did you mean keep_ratio?"),
        ("policy=dynt", "policy=dynt is unknown: did you mean dynts?"),
        ("benchmark=toy_chian", "benchmark=toy_chian is unknown: did you mean toy_chain?"),
        ("model=toy_qwe", "model=toy_qwe is unknown: did you mean toy_qwen?"),
        ("grid.policy=[dynts,windw]", "grid.policy=windw is unknown: did you mean window?"),
        ("zzzzzz=1", "zzzzzz is not a setting: Choose from model, benchmark,"),
    ],
)
def test_a_mistyped_name_is_answered_with_its_neighbour(mistake, answer, kvsweep):
    ended = kvsweep(mistake)
    assert ended.code == 2
    assert answer in ended.err
    assert f"use +{mistake.lstrip('+')}" not in ended.err
