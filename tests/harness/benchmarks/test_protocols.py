"""Each protocol asks as the harness that it is named after.

protocol_prompts.json has made-up problems as the harnesses' own code rendered them, with repository and commit:
simple-evals' two evaluations with a sampler that noted its messages, lighteval's prompt functions and its prompt
manager, lm-evaluation-harness's templates and process_docs, NeMo-Skills' prompts and rows, DynTS' parse_question.
`golds` are the letters of all six rows in their order.
"""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems, read_prompt
from kvsweep.harness.command import collect_jobs
from kvsweep.harness.settings import CONF, build, choices
from kvsweep.harness.sweep.job import make_job, named_protocol
from kvsweep.messages.errors import UserError

RECORDED = json.loads((Path(__file__).parent / "protocol_prompts.json").read_text())
PROTOCOLS = sorted(RECORDED["protocols"])
RENDERED = [name for name in PROTOCOLS if "letter" in RECORDED["protocols"][name]]
# Those of the others come from a generator that the whole program shares.
ORDERED = ["sgl_eval", "simple_evals"]


@pytest.fixture
def asked(compose, tmp_path):
    """`asked(protocol, benchmark, rows)` is the benchmark that a protocol asks, with its problems."""

    def load(protocol, benchmark, rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps({**row, 'Record ID': row['id']})}\n" for row in rows))
        config = compose(f"protocol={protocol}", f"benchmark={benchmark}", f"benchmark.path={path}")
        section = build(BenchmarkConfig, "benchmark", config.benchmark)
        return section, load_problems(section).problems

    return load


def test_every_protocol_was_compared():
    assert choices("protocol") == PROTOCOLS


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_problems_are_asked_as_the_harness_asks_them(protocol, asked):
    recorded, rows = RECORDED["protocols"][protocol], RECORDED["rows"]["math"]
    _, problems = asked(protocol, "aime24", rows)
    if protocol == "deepseek":
        assert [one.prompt for one in problems] == [f"{row['problem']}\n{recorded['directive']}" for row in rows]
    else:
        assert [one.prompt for one in problems] == recorded["math"]


@pytest.mark.parametrize("protocol", RENDERED)
def test_questions_with_options_are_asked_as_the_harness_asks_them(protocol, asked):
    recorded, rows = RECORDED["protocols"][protocol], RECORDED["rows"]["letter"]
    section, problems = asked(protocol, "gpqa_diamond", rows)
    for row, one in zip(rows, recorded["letter"], strict=False):
        assert read_prompt(section.prompt).ask(row["Question"], one["options"]) == one["prompt"]
    if protocol in ORDERED:
        assert [one.prompt for one in problems[:2]] == [one["prompt"] for one in recorded["letter"]]
        assert "".join(one.gold for one in problems) == recorded["golds"]
    else:
        assert section.option_order == "balanced"


def test_deepseek_asks_questions_with_options_as_simple_evals_does(asked):
    rows = RECORDED["rows"]["letter"]
    assert asked("deepseek", "gpqa_diamond", rows)[0].prompt == asked("simple_evals", "gpqa_diamond", rows)[0].prompt


def test_stored_ids_keep_the_earlier_wording():
    options = dict(zip("ABCD", "wxyz", strict=True))
    own, theirs = (read_prompt(name).ask("Why?", options) for name in ("simple_evals", "simple_evals_letter"))
    assert own.splitlines()[0].startswith("Answer the multiple choice question below.")
    assert own != theirs
    assert OmegaConf.load(CONF / "benchmark" / "gpqa_diamond.yaml").prompt == "simple_evals"


@pytest.mark.parametrize(
    ("protocol", "benchmark", "tokens", "draws"),
    [
        ("dynts", "aime24", 16_384, 5),
        ("deepseek", "aime24", 32_768, 64),
        ("simple_evals", "gpqa_diamond", 2_048, 10),
        ("lighteval", "aime24", 32_768, 1),
        ("lm_eval", "aime24", 32_768, 1),
        ("lm_eval", "gpqa_diamond", 256, 1),
        ("sgl_eval", "aime24", 32_768, 16),
        ("sgl_eval", "gpqa_diamond", 32_768, 8),
    ],
)
def test_length_and_draws_are_those_of_the_benchmark(protocol, benchmark, tokens, draws, compose):
    config = compose(f"protocol={protocol}", f"benchmark={benchmark}")
    assert (config.decoding.max_new_tokens, config.draws) == (tokens, draws)
    assert (config.decoding.name, config.protocol.name) == (protocol, protocol)
    assert named_protocol(config)["protocol"]["changed"] == []


def test_a_protocol_replaces_an_experiments_prompt_decoding_and_draws(compose):
    config = compose("experiment=heatmap_r1_qwen", "protocol=deepseek")
    assert (config.benchmark.prompt, config.decoding.top_k, config.draws) == ("boxed", 0, 64)
    assert (config.policy.budget, config.grid.policy) == (5000, ["full", "dynts"])


def test_what_is_set_otherwise_is_named(compose, tmp_path):
    config = compose("protocol=deepseek", "draws=2", "decoding.max_new_tokens=64", f"results_dir={tmp_path}")
    job = make_job(config)
    changed = job.resolved["protocol"]["changed"]
    assert changed == ["benchmark.name=toy_chain", "draws=2", "decoding.max_new_tokens=64"]
    assert "protocol" not in make_job(compose(f"results_dir={tmp_path}")).resolved


def test_a_second_decoding_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["kvsweep", "protocol=deepseek", "decoding=r1"])
    with pytest.raises(UserError, match="protocol=deepseek and decoding=r1 both set the decoding: leave one out"):
        collect_jobs()
