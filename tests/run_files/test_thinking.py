"""Tags of thinking and tokens that end a text, as the templates and tokenizers of published models write them."""

import pytest

from kvsweep.run_files.thinking import ThinkTags, answer_part, ending, joined, thinking_of, without_end

NO_TAGS = ThinkTags(start=None, end=None)
# Opening and closing tag by a model that writes them.
MODELS = {
    "DeepSeek-R1, Qwen3": ("<think>", "</think>"),
    "Kimi-VL-Thinking": ("◁think▷", "◁/think▷"),
    "Magistral": ("[THINK]", "[/THINK]"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    "Sky-T1": ("<|begin_of_thought|>", "<|end_of_thought|>"),
    "Command A Reasoning": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "Seed-OSS": ("<seed:think>", "</seed:think>"),
    "EXAONE Deep": ("<thought>", "</thought>"),
    "Marco-o1": ("<Thought>", "</Thought>"),
    "LongCat-Flash-Thinking": ("<longcat_think>", "</longcat_think>"),
    "Gemma 4": ("<|channel>thought", "<channel|>"),
    "MedGemma": ("<unused94>", "<unused95>"),
    "Granite 3.2": ("Here is my thought process:", "Here is my response:"),
    "Apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "a tag with a start and an end": ("<|reasoning_start|>", "<|reasoning_end|>"),
}
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<turn|>",
]
ENDS += ["[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<|return|>\n", "</s></s>", "<eos><pad><pad>", "[EOS]"]


@pytest.mark.parametrize("model", MODELS)
def test_a_text_shows_its_thinking(model):
    tags = ThinkTags(start=MODELS[model][0], end=MODELS[model][1])
    whole, cut = joined("is it 4", "5", tags, ended=True), joined("is it 4", None, tags, ended=False)
    for text, opens, closes in ((whole, True, True), (cut, True, False), (whole[len(str(tags.start)) :], False, True)):
        assert thinking_of(text) == (tags, opens, closes, True)
        assert answer_part(text, tags) == answer_part(text, NO_TAGS) == ("5" if closes else None)
    # A thinking that speaks of another model's tag.
    if tags.end != "</think>":
        assert answer_part(joined("as </think> says", "5", tags, ended=True), NO_TAGS) == "5"


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "text", ["Answer: C", "It is $\\boxed{4}$.", "<|begin_of_box|>4<|end_of_box|>", "<answer>4</answer>"]
)
def test_a_token_at_the_end_is_no_part_of_an_answer(text, end):
    assert without_end(text + end) == without_end(text) == answer_part(text + end, NO_TAGS) == text


@pytest.mark.parametrize("text", ["a < b > c", "[1, 2]", "(2, 3]", "see <b>4</b>", "x</sup>", ""])
def test_other_signs_stay(text):
    assert without_end(text) == text
    assert thinking_of(text) is None


LENGTH = ["length", "max_tokens", "max_new_tokens", "FinishReason.MAX_TOKENS", "FINISH_REASON_MAX_TOKENS"]
LENGTH += [
    "model_length",
    "model_context_window_exceeded",
    "limit",
    {"type": "length", "length": 1024},
    "stopped_limit",
]
STOP = ["stop", "end_turn", "STOP_SEQUENCE", "eos_token", "FinishReason.STOP", {"type": "stop", "matched": 151645}]
NEITHER = [
    None,
    5,
    "",
    "abort",
    "content_filter",
    "tool_calls",
    "unfinished",
    "not_finished",
    {"reason": "length"},
    ["length"],
]


@pytest.mark.parametrize(("said", "reasons"), [("length", LENGTH), ("stop", STOP), (None, NEITHER)])
def test_endings_of_programs(said, reasons):
    assert {str(reason): ending(reason) for reason in reasons} == dict.fromkeys(map(str, reasons), said)
