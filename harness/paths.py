"""Where the configuration lies, beside the repository's packages or inside an installed one, and what its YAML may ask.

`${embedded:NAME}` is a folder of the embedded weights, `${choices:GROUP}` the names in a group of the configuration.
"""

import textwrap
from pathlib import Path

from omegaconf import OmegaConf

from harness.toy.paths import WEIGHTS

_BESIDE_REPOSITORY = Path(__file__).resolve().parent.parent / "conf"
_INSIDE_WHEEL = Path(__file__).resolve().parent / "conf"
CONF = _INSIDE_WHEEL if _INSIDE_WHEEL.is_dir() else _BESIDE_REPOSITORY


def _choices(group: str) -> str:
    """The names as `kvsweep --help` shows them."""
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return textwrap.fill(", ".join(names), width=92, subsequent_indent=" " * 13)


OmegaConf.register_new_resolver("embedded", lambda name: str(WEIGHTS / name), replace=True)
OmegaConf.register_new_resolver("choices", _choices, replace=True)
