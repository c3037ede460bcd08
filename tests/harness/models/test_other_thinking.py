"""Models that think otherwise: tags of several tokens, none at all, base models without a chat template."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsweep.harness.grading.answers import judge
from kvsweep.harness.grading.grader import read_standard
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.traces import trace_of_text
from kvsweep.messages.errors import UserError
from tests.harness.models.test_families import described


def of_folder(folder: Path, **fields: Any) -> LoadedModel:
    return load_model(ModelConfig(name="tiny", title="Tiny", path=str(folder), threads=1, **fields))


def of_bytes(**fields: Any) -> LoadedModel:
    """A tiny model with the stand-in tokenizer, which writes any text; only </think> is one token."""
    model = load_model(described("llama", {}))
    return replace(model, config=replace(model.config, **fields))


@pytest.mark.parametrize("tag", ["[/T]", "END OF THOUGHT\n", "</think>"])
def test_the_thinking_ends_where_the_text_of_the_tag_begins(tag):
    model = of_bytes(think_end=tag)
    write = model.tokenizer.encode
    for before in ("", "p=4", "1+2=3. The rest follows"):
        ids = [*write(before, add_special_tokens=False), *write(tag + "7", add_special_tokens=False)]
        closing = model.dialogue.closing_tag(ids)
        assert closing is not None
        assert model.dialogue.decode(ids[: closing.start]) == before
        assert model.dialogue.decode([ids[i] for i in closing]) == tag
        assert (len(closing) == 1) == (tag == "</think>")
    assert model.dialogue.closing_tag(write("p=4+2", add_special_tokens=False)) is None
    trace, answer = trace_of_text("1+2?", f"1+2=3{tag}7", ("p", 0), model.config.tags, model, "the text")
    assert model.dialogue.decode(trace.token_ids[trace.answer_start :]) == answer == "7"


def test_a_model_without_a_tag_thinks_nothing(tiny_model_dir):
    model = of_folder(tiny_model_dir, think_end=None, think_start=None)
    assert not model.dialogue.thinks
    assert model.dialogue.closing_tag([1, 2, 3]) is None
    assert model.dialogue.thinking_opened_by == "model"


def test_the_whole_text_is_the_answer_of_a_model_that_does_not_think(tmp_path):
    text = r"It is \boxed{7}."
    for end, outcome in ((None, "correct"), ("</think>", "no_answer")):
        model = {"think_start": None, "think_end": end}
        cell = {"schema": 1, "model": model, "benchmark": {"answer_kind": "integer"}}
        (tmp_path / "cell.yaml").write_text(yaml.safe_dump(cell))
        (tmp_path / "problems.jsonl").write_text('{"schema": 1, "id": "p", "prompt": "?", "gold": "7"}\n')
        assert judge(text, "stop", "7", "integer", read_standard(tmp_path).rule)[1] == outcome


def test_a_tag_that_the_tokenizer_cannot_write_is_refused_at_load(tiny_model_dir):
    with pytest.raises(UserError, match=r"model\.think_end=END OF IT cannot be written by the tokenizer"):
        of_folder(tiny_model_dir, think_end="END OF IT")


@pytest.fixture
def edited(tiny_model_dir, tmp_path) -> Callable[[str | None], Path]:
    """`edited(template)` is a copy of the model with this chat template, or without one."""

    def edit(template):
        target = shutil.copytree(tiny_model_dir, tmp_path / f"m{len([*tmp_path.iterdir()])}")
        for path in target.glob("chat_template*"):
            path.unlink()
        settings = json.loads((target / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        if template is not None:
            (target / "chat_template.jinja").write_text(template)
        return target

    return edit


def test_the_templates_own_system_prompt_is_left_alone():
    template = (
        "{% if messages[0]['role'] != 'system' %}You are Tiny.{% endif %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    )
    model = of_bytes(think_end=None)
    model.tokenizer.chat_template = template
    assert model.dialogue.decode(list(model.dialogue.prompt_ids("p=4"))) == "You are Tiny.[user]p=4>"


def test_a_base_model_is_asked_the_bare_question(tiny_model_dir, edited):
    folder = edited(None)
    with pytest.raises(UserError, match=r"model\.chat_template=none for a base model"):
        of_folder(folder)
    model = of_folder(folder, chat_template="none")
    assert model.dialogue.prompt_ids("p=4+2") == tuple(model.tokenizer("p=4+2").input_ids)
    assert model.config.identity() != of_folder(tiny_model_dir).config.identity()
    with pytest.raises(UserError, match="broken"):
        of_folder(edited("{{ raise_exception('broken template') }}"))
    with pytest.raises(UserError, match=r"takes a question \(TemplateError\)"):  # it says nothing
        of_folder(edited("{{ raise_exception('') }}"))


BLOCK = "{{ messages[0]['content'] }}<a>{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"


def test_a_template_that_closes_the_thinking_is_refused_and_a_variable_opens_it(edited):
    folder = edited(BLOCK)
    for forced in (False, True):
        with pytest.raises(UserError, match=r"closes the thinking \(</think>\) itself, .*: give model.think_end=null"):
            of_folder(folder, force_think=forced)
    by_question = "{% set enable_thinking = 'no_think' not in messages[0]['content'] %}" + BLOCK
    sometimes = of_folder(edited(by_question))
    assert sometimes.dialogue.asked("p=4").endswith("<think>\n")
    with pytest.raises(UserError, match="closes the thinking"):
        sometimes.dialogue.prompt_ids("p=4 no_think")
    answers = of_folder(folder, think_end=None)
    assert answers.dialogue.decode(list(answers.dialogue.prompt_ids("p=4"))).endswith("</think>\n\n")
    thinks = of_folder(folder, template={"enable_thinking": True}, force_think=True)
    assert thinks.dialogue.thinking_opened_by == "template"
    assert thinks.dialogue.asked("p=4").endswith("<a><think>\n")
    plain = replace(thinks.config, template=None).identity()
    assert thinks.config.identity() == {**plain, "template": {"enable_thinking": True}}


@pytest.mark.parametrize(
    ("behind", "found"),
    [
        ("<a>", "unopened"),
        ("<a><think>", "open"),
        ("<a><think>\nWell, ", "open"),
        ("<a></think>", "closed"),
        ("<a><think> </think><think>", "open"),
    ],
)
def test_what_the_prompt_opens_and_closes_is_read_behind_the_question(behind, found):
    model = of_bytes()
    model.tokenizer.chat_template = "Think in <think></think>. {{ messages[0]['content'] }}" + behind
    text = model.dialogue._templated("Is </think> a tag?")
    assert model.dialogue.thinking_behind("Is </think> a tag?", text) == found


def test_a_variable_is_one_that_the_template_alone_reads(tiny_model_dir, edited):
    with pytest.raises(UserError, match=r"reads no variable enable_thinkin, which model.template sets"):
        of_folder(edited(BLOCK), template={"enable_thinkin": True})
    with pytest.raises(UserError, match="template sets messages, which kvsweep itself does"):
        of_folder(tiny_model_dir, template={"messages": []})
    with pytest.raises(UserError, match="has variables of a chat template"):
        of_folder(tiny_model_dir, template={"a": 1}, chat_template="none")


ENDS = "{% for m in messages %}<u>{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}{% endfor %}"

PADS = ENDS.replace("eos_token if", "pad_token if")


@pytest.mark.parametrize(
    ("eos", "template", "noted"),
    [
        ([2], ENDS, ""),
        ([1], ENDS, "its tokenizer ends an answer with"),
        ([1, 2], "{{ bos_token }}" + PADS.replace("'assistant'", "m['role']"), "its chat template ends an answer with"),
        ([2], PADS.replace(" if m['role'] == 'assistant'", "").replace("pad_token", "''") + "<a>", ""),
        ([1, 2], PADS + "{% if add_generation_prompt %}<a>{% endif %}", "its chat template ends an answer with"),
    ],
)
def test_an_end_that_generation_config_does_not_name_is_told(eos, template, noted, edited, capsys):
    folder = edited(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    of_folder(folder)
    told = capsys.readouterr().err
    assert noted in told
    assert ("eos_token_id" in told) == bool(noted)


@pytest.mark.parametrize("eos", [-1, 5000, [2, 5000]])
def test_an_end_that_no_model_writes_is_refused(eos, edited):
    folder = edited(ENDS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match=r"no model of \d+ tokens writes \[(-1|5000)\]: correct eos_token_id"):
        of_folder(folder)


@pytest.mark.slow
def test_a_sweep_without_tags_and_a_note_where_answers_are_missing(kvsweep, tiny, tiny_policy, tmp_path):
    arguments = [*tiny, *tiny_policy, f"results_dir={tmp_path}", "benchmark.limit=2", "policy=window"]
    ended = kvsweep(*arguments, "model.think_end=null", "model.think_start=null", "decoding.stop_on_loop=false")
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for path in tmp_path.rglob("completions.jsonl") for line in path.open()]
    assert {row["thinking_tokens"] for row in rows} == {0}
    refused = kvsweep(*arguments, "policy=dynts", "model.think_end=null")
    assert refused.code == 2
    assert "policy=dynts keeps the answer behind model.think_end, which is null" in refused.err
