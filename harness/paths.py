"""Where the configuration lies: beside the repository's packages, or inside an installed one."""

from pathlib import Path

_BESIDE_REPOSITORY = Path(__file__).resolve().parent.parent / "conf"
_INSIDE_WHEEL = Path(__file__).resolve().parent / "conf"
CONF = _INSIDE_WHEEL if _INSIDE_WHEEL.is_dir() else _BESIDE_REPOSITORY
