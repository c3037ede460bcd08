"""Where thinking and answer begin and end; the bounds of the real texts were read by hand."""

import json

import pytest

from kvsweep.base.errors import UserError
from kvsweep.harness.models.thinking import ThinkTags, segment_text

THINK = ThinkTags()
THOUGHT = ThinkTags(start="<|begin_of_thought|>", end="<|end_of_thought|>")

# Row of traces.jsonl: first character of the thinking, of the closing tag, of the answer. None: never closed.
BY_HAND = {
    0: (0, 3514, 3522),
    1: (0, 5080, 5088),
    2: None,
    3: (0, 9379, 9387),
    4: (0, 35315, 35323),
    5: (0, 10734, 10742),
    6: (0, 19916, 19924),
    7: (0, 22750, 22758),
    8: (7, 2943, 2951),
    9: (7, 28114, 28122),
    10: (20, 3857, 3875),
    11: (20, 38701, 38719),
    12: (20, 16446, 16464),
    13: None,
}


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("a</think>b", "a", "b"),
        ("\n<think>\na</think>\n\nb", "\na", "\n\nb"),
        ("a</think>b<think>c</think>d", "a</think>b<think>c", "d"),
        ("a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_segments(text, thinking, answer):
    assert [text[part] for part in segment_text(text, THINK)] == [thinking, answer]


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("ab</think>cd", "ab"),
        ("<think>ab</think>cd", "<think>ab"),
        ("ab", None),
        ("<think>ab", None),
        ("a</think>b<think>c</think>d", "a</think>b<think>c"),
        ("a</think>b<think>c", None),
        ("a</think>b</think>c", "a"),
        ("a</think>", "a"),
        ("</think>a", ""),
        ("a, as <think> is a tag</think>b", "a, as <think> is a tag"),
        ("", None),
    ],
)
def test_the_tag_that_closes_the_thinking(text, before):
    closing = THINK.closing(text)
    assert (None if closing is None else text[:closing]) == before


def test_other_tags():
    text = "<|begin_of_thought|>\n\nwhy</think><|end_of_thought|>so"
    assert text[: THOUGHT.closing(text)] == "<|begin_of_thought|>\n\nwhy</think>"


@pytest.mark.parametrize("text", ["", "a", "<think>a", "a</think>b<think>c"])
def test_unclosed_is_refused(text):
    assert THINK.closing(text) is None
    with pytest.raises(UserError, match="row 7 never closes its thinking with </think>"):
        segment_text(text, THINK, name="row 7")


def test_an_empty_answer_is_refused():
    with pytest.raises(UserError, match="no thinking or no answer"):
        segment_text("a</think> \n", THINK)


@pytest.mark.shared
def test_real_texts(shared_data):
    rows = [json.loads(line) for line in (shared_data / "traces.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        tags = THOUGHT if "<|begin_of_thought|>" in row["text"] else THINK
        assert (tags.closing(row["text"]) is not None) == row["closed"] == (BY_HAND[number] is not None), number
        if not row["closed"]:
            with pytest.raises(UserError, match="never closes"):
                segment_text(row["text"], tags)
            continue
        thinking, answer = segment_text(row["text"], tags)
        assert (thinking.start, thinking.stop, answer.start) == BY_HAND[number], number
        assert "boxed" in row["text"][answer]
        assert tags.start not in row["text"][thinking.start :]
