"""Sweeps of KV-cache compression for reasoning language models.

The names below are imported when they are first asked for, so `import kvsweep` takes no time and needs no torch.
"""

from importlib import import_module
from typing import Any

_OFFERED = {
    "load_model": "harness.notebook",
    "policy": "harness.notebook",
    "generate": "harness.notebook",
    "Policy": "compression.policy",
    "BudgetPolicy": "compression.policy",
    "CacheView": "compression.policy",
    "Selection": "compression.policy",
    "SlotCache": "compression.cache",
    "Prefill": "compression.cache_rows",
    "use_slot_attention": "compression.cache",
    "ModelSpec": "harness.models.spec",
    "ModelConfig": "harness.models.config",
    "Engine": "harness.decode.engine",
    "Request": "harness.decode.request",
    "Branch": "harness.decode.request",
    "DecodingConfig": "harness.decode.request",
    "SamplingConfig": "harness.decode.request",
    "compose_config": "harness.settings",
    "make_job": "harness.sweep.job",
    "load_run": "analysis.load",
    "cell_metrics": "analysis.statistics.metrics",
    "build_report": "analysis.report.build",
    "UserError": "messages.errors",
}


__all__ = list(_OFFERED)


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"kvsweep has no {name}: it offers {', '.join(sorted(_OFFERED))}.")
    return getattr(import_module(f"kvsweep.{_OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
