"""How numbers and settings are written, the same in pictures, tables and the terminal."""

import math
from typing import Any

MISSING = "–"

# The policies that are known, in the order in which they are shown, as their papers write them.
POLICY_TITLES = {
    "full": "full cache",
    "dynts": "DynTS",
    "no_question": "DynTS, no question",
    "no_window": "DynTS, no window",
    "rkv": "R-KV",
    "rkv_paper": "R-KV (paper)",
    "rkv_dynts_code": "R-KV (DynTS code)",
    "snapkv": "SnapKV",
    "snapkv_dynts_code": "SnapKV (DynTS code)",
    "h2o": "H2O",
    "h2o_dynts_code": "H2O (DynTS code)",
    "tova": "TOVA",
    "tova_kvpress": "TOVA (kvpress)",
    "vase": "VaSE",
    "keydiff": "KeyDiff",
    "knorm": "K-norm",
    "sepllm": "SepLLM",
    "sepllm_dynts_code": "SepLLM (DynTS code)",
    "streaming_llm": "StreamingLLM",
    "streaming_llm_dynts_code": "StreamingLLM (DynTS code)",
    "window": "window",
    "random": "random",
    "bottom": "bottom",
}
VARIANT_TITLES = {"original": "", "dynts_code": "DynTS code", "kvpress": "kvpress"}


def number(value: Any) -> str:
    """A setting without needless digits: 0.3, 48; missing as a dash."""
    return MISSING if missing(value) else f"{value:.10g}"


def percent(fraction: float) -> str:
    """A fraction in percent with one decimal, without the sign: 0.4733 -> "47.3"; missing as a dash."""
    return MISSING if missing(fraction) else f"{100 * fraction:.1f}"


def percent_pm(fraction: float, error: float, *, signed: bool = False) -> str:
    """Percent and standard error: "47.3 ± 2.1"; an unknown error (a single problem) is left out."""
    if missing(fraction):
        return MISSING
    value = f"{100 * fraction:+.1f}" if signed else percent(fraction)
    return value if missing(error) else f"{value} ± {percent(error)}"


def decimal(value: float, digits: int = 1) -> str:
    """A mean with so many decimals and thousands separated; missing as a dash."""
    return MISSING if missing(value) else f"{value:,.{digits}f}"


def p_value(p: float) -> str:
    """A p-value with three decimals, "<0.001" below that; missing as a dash."""
    return MISSING if missing(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def setting(row: Any, *, budget: bool = True) -> str:
    """One policy setting in words, from a row of metrics: "dynts 0.3 / 48, budget 128"."""
    axes = [number(value) for value in (row.keep_ratio, row.local_window) if not missing(value)]
    name = f"{row.policy} {' / '.join(axes)}".strip()
    return name + of_grid(row.budget if budget else None, row.variant)


def of_grid(budget: float | None, variant: str) -> str:
    """What a setting's name goes on with: ", budget 128, question_on_top=true"."""
    return ("" if budget is None or missing(budget) else f", budget {number(budget)}") + (
        f", {variant}" if variant else ""
    )


def policy_title(policy: str, variant: str = "") -> str:
    """A policy's name for a picture: "SnapKV", "SnapKV (DynTS code)", "DynTS (question_on_top=true)".

    Args:
        variant: as in `load_cells`. Of its field `variant` the value alone is named, and that of the
            original form is left out.
    """
    fields = [field.strip() for field in variant.split(",")]
    words = [_variant_title(field) for field in fields]
    named = ", ".join(word for word in words if word)
    return POLICY_TITLES.get(policy, policy) + (f" ({named})" if named else "")


def _variant_title(field: str) -> str:
    name, _, value = field.partition("=")
    return VARIANT_TITLES.get(value, value.replace("_", " ")) if name == "variant" else field


def missing(value: Any) -> bool:
    """Whether a number is None or NaN."""
    return value is None or math.isnan(float(value))
