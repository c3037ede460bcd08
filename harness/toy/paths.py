"""The folder of the embedded toy weights."""

from pathlib import Path

WEIGHTS: Path = Path(__file__).resolve().parent / "weights"
