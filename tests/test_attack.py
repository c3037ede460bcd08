"""The short form of scripts/attack/attack.py; the long one's figures are in results/published/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.first
def test_no_attack_gets_through() -> None:
    ended = subprocess.run(
        [sys.executable, "scripts/attack/attack.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout
    told = json.loads(ended.stdout.splitlines()[-1])
    del told["seconds"]
    assert len(told) == 10
    assert all(tally["tried"] > 0 for tally in told.values())
    assert not [count for tally in told.values() for name, count in tally.items() if name != "tried" and count]
