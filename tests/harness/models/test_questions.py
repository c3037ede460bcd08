"""What chat templates and tokenizers may do to a question: it is the same every day, each token is the model's."""

import datetime
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from kvsweep.errors import UserError
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.settings import WEIGHTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(WEIGHTS / "toy_qwen", tmp_path / "m")
    return tmp_path / "m"


def begins_with(folder: Path, line: str) -> ModelConfig:
    """The toy whose chat template begins with a line."""
    template = folder / "chat_template.jinja"
    template.write_text(line + template.read_text())
    return ModelConfig(name="m", title="M", path=str(folder), threads=1)


def test_a_template_that_writes_the_date_gets_one_of_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch):
    config = begins_with(folder, '{{ strftime_now("%Y+%m+%d") }}')
    seen = []
    for day in (24, 25):

        class Day(datetime.datetime):
            @classmethod
            def now(cls, tz=None, day=day):
                return datetime.datetime(2026, 11, day)

        monkeypatch.setattr(chat_template_utils, "datetime", Day)
        chat_template_utils._compile_jinja_template.cache_clear()
        seen.append(load_model(config).prompt_ids("a=1+2"))
    assert seen[0] == seen[1]
    other = replace(config, today="2026-11-24")
    assert load_model(other).prompt_ids("a=1+2") != seen[0]
    assert config.identity() == {**other.identity(), "today": "2026-01-01"}


def test_the_date_is_part_of_the_identity_where_a_template_may_ask_for_it(folder: Path):
    plain = ModelConfig(name="m", title="M", path=str(folder))
    assert "today" not in plain.identity()
    hub = replace(plain, path="someone/model")  # which is not fetched yet
    assert "today" not in hub.identity()
    assert replace(hub, today="2026-11-24").identity()["today"] == "2026-11-24"
    assert "today" not in replace(hub, today="2026-11-24", chat_template="none").identity()
    with pytest.raises(UserError, match=r"model\.today=24 Nov is no date: write it as 2026-01-01"):
        replace(plain, today="24 Nov")


@pytest.mark.parametrize("line", ["{{ [1, 2, 3] | random }}", "{{ lipsum(1) }}"])
def test_a_template_that_draws_at_random_is_refused(folder: Path, line: str):
    with pytest.raises(UserError, match="draws at random"):
        load_model(begins_with(folder, line))


def test_a_token_that_the_model_does_not_embed_is_refused_before_anything_is_decoded(folder: Path, kvsweep, tmp_path):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([*(f"<extra{i}>" for i in range(128 - len(tokenizer))), "Find"])
    tokenizer.save_pretrained(folder)
    own = [f"model.path={folder}", "model.name=mine", "model.title=Mine"]
    ended = kvsweep("model=toy_qwen", *own, "benchmark=toy_chain", "policy=full", f"results_dir={tmp_path}/out")
    assert ended.code == 2
    assert "has the token 'Find' (128) in a text, and the model embeds 128 tokens" in ended.err
    assert not [path for path in tmp_path.rglob("completions*.jsonl") if path.stat().st_size]
