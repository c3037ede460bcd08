"""Build the tokenizer of a GGUF file: each field is used, known to have no effect, or refused by name.

transformers skips control tokens that a byte-level alphabet cannot spell, cuts words as GPT-2 does if it does not know
the file's cut, and ignores `add_space_prefix` (`gguf_tokenizer_mapping`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsweep.messages.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# The fields with ids of roles that a text or a template may name, and of tokens that end a completion.
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Fields from which the tokenizer is built, and fields without effect if they have this value; None: any value.
_KNOWN: dict[str, Any] = dict.fromkeys(
    ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.add_sep_token", "tokenizer.ggml.add_eos_token"), False
)
_KNOWN |= dict.fromkeys(
    (
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.token_type_count",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.add_space_prefix",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.chat_template",
        "tokenizer.chat_templates",
    )
)

_NORMAL, _CONTROL, _ADDED, _LAST_TYPE = 1, 3, 4, 6
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{one}{_LOWER}{two}" for one, two in ("*+", "+*"))
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"


class _Cut(NamedTuple):
    """How a text is cut before its tokens are merged."""

    piece: str | None = None  # regular expression of a piece; None: GPT-2's
    digits: bool = False  # True: each digit is a piece
    ignore_merges: bool = False  # True: a piece that is a token is never cut, and a text begins with BOS by default
    composed: bool = False  # True: characters are composed first (NFC)


# By `tokenizer.ggml.pre`, as in the tokenizer.json of the models with this name.
_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(digits=True),
    "llama-bpe": _Cut(_WORDS % "{1,3}", ignore_merges=True),
    "tekken": _Cut(_TEKKEN, ignore_merges=True),
    "qwen2": _Cut(_WORDS % "", composed=True),
    "deepseek-r1-qwen": _Cut(_WORDS % "", composed=True),
}


def build_tokenizer(fields: Mapping[str, Any], file: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a file's fields; raises UserError that names an unknown field or token."""
    from transformers import PreTrainedTokenizerFast

    if fields["general.architecture"] == "phi3" and fields.get("tokenizer.ggml.model") == "llama":
        raise UserError("its control tokens take blanks behind them (Phi-3), of which the file says nothing")
    _check_fields(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = fields.get("tokenizer.ggml.model")
    if vocabulary == "gpt2":
        backend = _byte_level(fields)
        begins_by_default = _CUTS[fields["tokenizer.ggml.pre"]].ignore_merges  # as `_Cut` says
    elif vocabulary == "llama":
        backend = _sentencepiece(fields, file)
        begins_by_default = True
    else:
        raise UserError(f"its tokenizer.ggml.model={vocabulary} is not known here, which gpt2 and llama are")
    _check_tokens(backend, tokens, fields["tokenizer.ggml.token_type"])
    special_tokens = {role: tokens[fields[name]] for role, name in _ROLES.items() if name in fields}
    begins = bool(fields.get("tokenizer.ggml.add_bos_token", begins_by_default))
    if begins and "bos_token" not in special_tokens:
        raise UserError("its texts begin with BOS, and it lacks the field tokenizer.ggml.bos_token_id")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        add_bos_token=begins,
        **special_tokens,
    )


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a completion: end of text, of turn, and of message."""
    return sorted({int(fields[name]) for name in _ENDS if name in fields})


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse missing, unknown and contradictory fields of the tokenizer."""
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        if name not in fields:
            raise UserError(f"it lacks the field {name}")
    for name, value in fields.items():
        if not name.startswith("tokenizer."):
            continue
        # tokenizer.chat_template.NAME: more templates.
        if name.endswith("_token_id") or name.startswith("tokenizer.chat_template."):
            continue
        if name not in _KNOWN or _KNOWN[name] not in (None, value):
            raise UserError(f"its field {name} ({value!r:.60}) is not known here")
    tokens = fields["tokenizer.ggml.tokens"]
    if len(set(tokens)) < len(tokens):
        raise UserError("it has a token twice")


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a byte-level vocabulary, which cuts texts as the file's `pre` says."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut = _CUTS.get(fields.get("tokenizer.ggml.pre", ""))
    if cut is None:
        raise UserError(
            f"its tokenizer.ggml.pre={fields.get('tokenizer.ggml.pre')} is a cut of words that is not known here, "
            f"which {', '.join(_CUTS)} are"
        )
    if fields.get("tokenizer.ggml.add_space_prefix"):
        raise UserError("its tokenizer.ggml.add_space_prefix=True is not known of a byte-level vocabulary")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]  # "t he" -> ("t", "he")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.ignore_merges))
    cuts: list[Any] = []
    if cut.digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.piece:
        cuts.append(pre_tokenizers.Split(Regex(cut.piece), "isolated"))
    # `use_regex` is GPT-2's cut.
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.piece is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    if cut.composed:
        backend.normalizer = normalizers.NFC()
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # a character for each byte
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _ADDED):
            backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
        elif kind == _NORMAL and not alphabet.issuperset(token):
            raise UserError(f"its token {token!r:.40} is spelled as no text of a byte-level vocabulary is")
    return backend


def _sentencepiece(fields: Mapping[str, Any], file: Path) -> Tokenizer:
    """Return transformers' tokenizer of the file, with a space in front of a text as the file says."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    if fields.get("tokenizer.ggml.pre", "default") != "default":
        raise UserError(
            f"its tokenizer.ggml.pre={fields['tokenizer.ggml.pre']} is not known of a vocabulary of SentencePiece"
        )
    backend: Tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer
    adds_space = fields.get("tokenizer.ggml.add_space_prefix")
    if adds_space is False and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer.prepend_scheme = "never"
        # The usual decoder, but for the last step, which would drop a space at the start of a text.
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if adds_space is not None:  # without the field, `load._check_spaces` looks at the texts
        first_token = backend.encode("a", add_special_tokens=False).tokens[0]
        if adds_space != first_token.startswith("▁"):
            raise UserError(f"transformers does not read its field tokenizer.ggml.add_space_prefix ({adds_space})")
    return backend


def _check_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Refuse a control or added token if the tokenizer does not read it as its own id at every place."""
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if not _NORMAL <= kind <= _LAST_TYPE:
            raise UserError(f"its token {token!r:.40} has the type {kind}, which is not known here")
        if kind in (_CONTROL, _ADDED) and i not in backend.encode(f"x{token}x", add_special_tokens=False).ids:
            raise UserError(f"its token {token!r:.40} ({i}) is cut into pieces by its tokenizer")
