"""The short form of scripts/chaos.py; the long one's figures are in results/published/."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_killed_shards_lose_double_and_change_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "scripts/chaos.py", "--kills", "4", "--problems", "8", "--longest", "15"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:] + ended.stdout
    told = json.loads(ended.stdout.splitlines()[-1])
    assert (told["rows"], told["lost"], told["doubled"], told["changed"]) == (24, 0, 0, 0)
    assert told["kills"] >= 5
