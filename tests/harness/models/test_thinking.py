"""Thinking tags divide texts and tokens alike, whoever writes the opening tag and however it is tokenised."""

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.models.thinking import ThinkTags, segment
from harness.toy.tokenizer import build_tokenizer

SHARED = os.environ.get("KVSWEEP_SHARED")
TAGS = ThinkTags()


def by_characters(text: str, tags: ThinkTags = TAGS) -> list[str]:
    """The parts of a completion whose tokens are its characters, after a prompt of three."""
    parts = segment(3, [ord(c) for c in text], tags=tags, decode=lambda ids: "".join(map(chr, ids)))
    ranges = (parts.question, parts.opening, parts.thinking, parts.closing, parts.answer)
    assert [i for r in ranges for i in r] == list(range(3 + len(text)))
    return [text[r.start - 3 : r.stop - 3] for r in ranges[1:]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ab</think>cd", ["", "ab", "</think>", "cd"]),
        ("<think>ab</think>cd", ["<think>", "ab", "</think>", "cd"]),
        ("\n<think>ab</think>cd", ["\n<think>", "ab", "</think>", "cd"]),
        ("ab", ["", "ab", "", ""]),
        ("<think>ab", ["<think>", "ab", "", ""]),
        ("a</think>b<think>c</think>d", ["", "a</think>b<think>c", "</think>", "d"]),
        ("a</think>b<think>c", ["", "a</think>b<think>c", "", ""]),
        ("a</think>b</think>c", ["", "a", "</think>", "b</think>c"]),
        ("a</think>", ["", "a", "</think>", ""]),
        ("</think>a", ["", "", "</think>", "a"]),
        ("a, as <think> is a tag</think>b", ["", "a, as <think> is a tag", "</think>", "b"]),
        ("", ["", "", "", ""]),
    ],
)
def test_the_parts_of_a_completion(text: str, parts: list[str]) -> None:
    assert by_characters(text) == parts


def test_other_tags() -> None:
    tags = ThinkTags(start="<|begin_of_thought|>", end="<|end_of_thought|>")
    text = "<|begin_of_thought|>\n\nwhy</think><|end_of_thought|>so"
    assert by_characters(text, tags) == ["<|begin_of_thought|>", "\n\nwhy</think>", "<|end_of_thought|>", "so"]


@pytest.mark.parametrize("opened_by", ["prompt", "completion"])
def test_tags_that_are_one_token(opened_by: str) -> None:
    tokenizer = build_tokenizer()
    text = ("" if opened_by == "prompt" else "<think>") + "Let me see. 1+1=2</think>So 2\\boxed{2}"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    close = ids.index(tokenizer.convert_tokens_to_ids("</think>"))
    parts = segment(7, ids, tags=ThinkTags(), decode=lambda ids: str(tokenizer.decode(ids)))
    assert parts.closing == range(7 + close, 7 + close + 1)
    assert parts.thinking == range(7 + (opened_by == "completion"), 7 + close)
    assert parts.answer == range(7 + close + 1, 7 + len(ids))
    assert parts.closed


def test_a_token_that_shares_characters_with_a_tag_counts_to_it() -> None:
    pieces = ["why.</", "think", ">\n\n", "so"]
    parts = segment(1, range(4), tags=ThinkTags(), decode=lambda ids: "".join(pieces[i] for i in ids))
    assert (parts.thinking, parts.closing, parts.answer) == (range(1, 1), range(1, 4), range(4, 5))


def chunks(text: str) -> list[bytes]:
    """Byte-level tokens of uneven length that cut through characters, as byte-pair tokenizers make them."""
    rng, data, pieces = random.Random(0), text.encode(), []
    while data:
        size = rng.randint(1, 6)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@pytest.mark.parametrize("text", ["größer — 証明 🤔</think>Größe 🤔", "🤔</think>", "<think>🤔🤔"])
def test_tokens_that_cut_through_characters(text: str) -> None:
    pieces = chunks(text)

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    parts = segment(0, range(len(pieces)), tags=ThinkTags(), decode=decode)
    close = text.find("</think>")
    if close < 0:
        assert not parts.closed
        return
    before = sum(len(pieces[i]) for i in parts.thinking)
    through = before + sum(len(pieces[i]) for i in parts.closing)
    start, end = len(text[:close].encode()), len(text[: close + 8].encode())
    assert before <= start < before + len(pieces[parts.closing.start])
    assert through - len(pieces[parts.closing.stop - 1]) < end <= through


@pytest.mark.shared
@pytest.mark.skipif(not SHARED, reason="KVSWEEP_SHARED does not name the folder of the problem files")
def test_real_traces() -> None:
    path = Path(str(SHARED)) / "data" / "traces.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 14
    for row in rows:
        other = row["open_tag"] not in (None, "<think>")
        tags = ThinkTags(start=row["open_tag"], end="<|end_of_thought|>") if other else ThinkTags()
        pieces = chunks(row["text"])
        parts = segment(
            0,
            range(len(pieces)),
            tags=tags,
            decode=lambda ids, p=pieces: b"".join(p[i] for i in ids).decode(errors="replace"),
        )
        assert parts.closed == row["closed"] == (tags.closing(row["text"]) is not None)
        assert bool(parts.opening) == (row["open_tag"] is not None)
        if row["closed"]:
            answer = b"".join(pieces[i] for i in parts.answer).decode(errors="replace")
            assert row["text"].split(tags.end)[1].endswith(answer.strip("�"))
            assert answer
