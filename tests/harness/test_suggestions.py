"""A name that is mistyped is answered with the nearest one that there is."""

import pytest

ANSWERS = {
    "policy.keep_rato=0.3": "policy.keep_rato is not a setting: did you mean policy.keep_ratio?",
    "modl=toy_qwen": "modl is not a setting: did you mean model?",
    "+policy.keep_rato=0.3": "policy.keep_rato is not a setting: did you mean keep_ratio?",
    "policy=dynt": "policy=dynt is unknown: did you mean dynts?",
    "grid.policy=[dynts,windw]": "grid.policy=windw is unknown: did you mean window?",
    "zzzzzz=1": "zzzzzz is not a setting: The command's --help",
}


@pytest.mark.parametrize("mistake", ANSWERS)
def test_a_mistyped_name_is_answered_with_its_neighbour(mistake, kvsweep):
    ended = kvsweep(mistake)
    assert (ended.code, ANSWERS[mistake] in ended.err) == (2, True), ended.err
    assert f"use +{mistake.lstrip('+')}" not in ended.err
