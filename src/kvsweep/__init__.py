"""Sweeps of KV-cache compression for reasoning language models.

The names below are imported when they are first asked for, so `import kvsweep` takes no time and needs no torch.
"""

from importlib import import_module
from typing import Any

_OFFERED = {
    "load_run": "kvsweep.analysis.load",
    "cell_metrics": "kvsweep.analysis.numbers.metrics",
    "compose_config": "kvsweep.harness.settings",
    "make_job": "kvsweep.harness.sweep.plan.job",
    "load_model": "kvsweep.harness.models.load",
    "ModelConfig": "kvsweep.harness.models.config",
    "Engine": "kvsweep.harness.decode.engine",
    "Request": "kvsweep.harness.decode.request",
    "Branch": "kvsweep.harness.decode.request",
    "DecodingConfig": "kvsweep.harness.decode.request",
    "SamplingConfig": "kvsweep.harness.decode.request",
    "Policy": "kvsweep.compression.policy",
    "BudgetPolicy": "kvsweep.compression.policy",
    "SlotCache": "kvsweep.compression.cache",
    "UserError": "kvsweep.base.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"kvsweep has no {name}: it offers {', '.join(sorted(_OFFERED))}.")
    return getattr(import_module(_OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
