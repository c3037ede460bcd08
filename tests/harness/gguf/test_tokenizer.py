"""The tokenizer of a GGUF file, beside `tokenizers`' own build of the same vocabulary: R1's too, where its file is."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvsweep.harness.gguf.tokenizer import build_tokenizer, end_ids
from kvsweep.messages.errors import UserError

# The expressions of the models' tokenizer.json.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS: dict[str, Any] = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": QWEN.replace(r"\p{N}| ", r"\p{N}{1,3}| "),
    "tekken": TEKKEN,
    "qwen2": QWEN,
    "deepseek-r1-qwen": QWEN,
}
TEXTS = [
    "What's 1234.5+67?\n\n  I'LL say  8x  9.\r\n\tEnd ",
    "f(x)=12\n\nx (y)//z\n/",
    "Żółć CamelCaseHTTP 漢字 😀 e\u0301",
    "a<｜User｜>b <think>\n x   y</think>",
    "   ",
]
# "(x" and " 1" are tokens of other cuts; "x9" is one that no merge makes.
MERGES = ["Ċ Ċ", "( x", "Ġ 1", "1 2", "12 3", "Ġ Ġ", "ĠĠ Ġ", "' s", ") /", "e l"]
CONTROL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
ADDED = ["<think>", "</think>", "   ", "ключ"]
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), "x9", *CONTROL, *ADDED]
PLAIN = len(TOKENS) - len(CONTROL) - len(ADDED)
FIELDS: dict[str, Any] = {
    "general.architecture": "qwen2",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "deepseek-r1-qwen",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * PLAIN + [3] * len(CONTROL) + [4] * len(ADDED),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": PLAIN,
    "tokenizer.ggml.eos_token_id": PLAIN + 1,
}


def own_build(pre: str, fields: dict[str, Any]) -> Tokenizer:
    """The tokenizer as `tokenizers` builds it from the vocabulary, with the model's own expression."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    whole = pre in ("llama-bpe", "tekken")
    found = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=whole))
    cut = CUTS[pre]
    if isinstance(cut, str):
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"), by_bytes])
    found.pre_tokenizer = cut
    if "qwen" in pre:
        found.normalizer = normalizers.NFC()
    found.decoder = decoders.ByteLevel()
    pairs = zip(tokens, types, strict=True)
    found.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind in (3, 4)])
    return found


@pytest.mark.parametrize("pre", CUTS)
def test_tokens_are_those_of_tokenizers_own_build(pre, tmp_path):
    found = build_tokenizer({**FIELDS, "tokenizer.ggml.pre": pre}, tmp_path)
    own = own_build(pre, FIELDS)
    for text in TEXTS:
        ids = found(text, add_special_tokens=False).input_ids
        assert ids == own.encode(text).ids, text
        assert found.decode(ids) == own.decode(ids, skip_special_tokens=False)
    assert found("x9", add_special_tokens=False).input_ids == own.encode("x9").ids
    begins = found("a").input_ids[0] == PLAIN
    assert begins == (pre in ("llama-bpe", "tekken"))
    assert (found.bos_token_id, found.eos_token_id) == (PLAIN, PLAIN + 1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tokenizer.ggml.pre": "seed-coder"}, "ggml.pre=seed-coder is a cut of words that is not known here"),
        ({"tokenizer.ggml.pre": None}, "ggml.pre=None is a cut"),
        ({"tokenizer.ggml.model": "rwkv"}, "ggml.model=rwkv is not known"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix=True"),
        ({"tokenizer.ggml.precompiled_charsmap": [1]}, "precompiled_charsmap .* is not known here"),
        ({"tokenizer.huggingface.json": "{}"}, "tokenizer.huggingface.json"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "begin with BOS, and it lacks"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token .* is not known here"),
        ({"tokenizer.ggml.token_type": None}, "lacks the field tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.token_type": [1] * len(TOKENS)}, "'<｜begin▁of▁sentence｜>' is spelled as no text"),
        ({"tokenizer.ggml.token_type": [7] * len(TOKENS)}, "has the type 7"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "a token twice"),
        # "x<think>" hides "<think>" behind an x.
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "x<think>"]}, r"'<think>' \(\d+\) is cut into pieces"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changed, named, tmp_path):
    fields = {name: value for name, value in {**FIELDS, **changed}.items() if value is not None}
    with pytest.raises(UserError, match=named):
        build_tokenizer(fields, tmp_path)


def test_texts_end_at_each_end_that_a_file_names():
    assert end_ids(FIELDS) == [PLAIN + 1]
    more = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": PLAIN + 1}
    assert end_ids({**FIELDS, **more}) == [7, PLAIN + 1]


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the extra smollm2 is not installed: gguf")
@pytest.mark.parametrize(("prefix", "tokens"), [(False, ["H", "i"]), (True, ["▁", "H", "i"]), (None, ["▁", "H", "i"])])
def test_a_space_in_front_of_a_text_is_written_as_the_file_says(prefix, tokens, tmp_path):
    import gguf

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "H", "i"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_bos_token_id(1)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = build_tokenizer(fields, tmp_path / "m.gguf")
    ids = found("Hi", add_special_tokens=False).input_ids
    assert found.convert_ids_to_tokens(ids) == tokens
    assert found.decode(ids) == "Hi"


R1 = os.environ.get("KVSWEEP_R1_GGUF")


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(R1 is None, reason="KVSWEEP_R1_GGUF names no GGUF of R1-Distill-Qwen, or its first 64 MB")
def test_the_prompts_of_r1_are_those_of_its_own_vocabulary(shared_data):
    from transformers.integrations.gguf.reader import read_gguf_metadata

    lists = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    fields, _ = read_gguf_metadata(str(R1), lists)
    found, own = build_tokenizer(fields, Path(str(R1))), own_build("deepseek-r1-qwen", fields)
    template = fields["tokenizer.chat_template"]
    bare = template.replace("{{bos_token}}", "")
    assert bare != template
    for name, count in (("aime24", 30), ("aime25", 30), ("amc23", 40)):
        questions = [json.loads(line)["problem"] for line in (shared_data / f"{name}.jsonl").read_text().splitlines()]
        assert len(questions) == count
        for found.chat_template, begins in ((template, True), (bare, False)):
            for question in questions:
                chat = [{"role": "user", "content": question}]
                text = found.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                ids = found(text, add_special_tokens=False).input_ids
                assert ids == own.encode(text).ids
                assert found.decode(ids) == text
                assert ids[: 1 + begins] == [151646, 151644][1 - begins :]
                assert ids[-1] == 151645
