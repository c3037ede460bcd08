"""Settings of a model's generation_config that transformers' `generate` applies and kvsweep does not."""

from typing import Any

# Each setting with its neutral value (an empty list is neutral too). Temperature, top_k, top_p and lengths are settings
# of the run, so they are not here.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("watermarking_config", "max_time")),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), False),
}
# Settings that act only on tokens drawn at random.
_NEUTRAL_DRAWN: dict[str, Any] = {
    "typical_p": 1,
    "top_h": None,
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0),
}


def unapplied_settings(generation: Any) -> list[str]:
    """Return the settings of a generation_config that would change what `generate` writes, as `name=value`."""
    neutral = dict(_NEUTRAL)
    if getattr(generation, "do_sample", None):
        neutral |= _NEUTRAL_DRAWN
    unapplied = []
    for name, neutral_value in neutral.items():
        value = getattr(generation, name, None)
        if value not in (None, [], neutral_value):
            unapplied.append(f"{name}={value!r:.60}")
    return unapplied
