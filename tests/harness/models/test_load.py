"""The real models without their weights: facts of their configurations, random builds, thinking in prompts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kvsweep.compression.config import fixed_bytes
from kvsweep.harness.models import load
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.spec import read_architecture, read_spec
from kvsweep.harness.settings import WEIGHTS, build, compose_config, plain
from kvsweep.messages.errors import UserError
from kvsweep.run_files.thinking import segment_text
from tests.harness.models.test_families import check_exact

# Layers, heads, groups, hidden size, vocabulary, context, theta and billions of parameters.
REAL = {
    "r1_qwen_7b": (28, 28, 4, 3584, 152064, 131072, 1e4, 7.6156),
    "r1_llama_8b": (32, 32, 8, 4096, 128256, 131072, 5e5, 8.0303),
    "r1_0528_qwen3_8b": (36, 32, 8, 4096, 151936, 131072, 1e6, 8.1907),
    "qwen3_1_7b": (28, 16, 8, 2048, 151936, 40960, 1e6, 1.7206),
    "qwen3_4b": (36, 32, 8, 2560, 151936, 40960, 1e6, 4.0225),
    "qwen3_8b": (36, 32, 8, 4096, 151936, 40960, 1e6, 8.1907),
    "qwen3_14b": (40, 40, 8, 5120, 151936, 40960, 1e6, 14.7683),
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "vocab_size": 512}


def config(name: str, small: bool = True, **fields: Any) -> ModelConfig:
    values = plain(compose_config(f"model={name}").model)
    if small:
        values["config"].update(SMALL)
        values.update(random_weights=True, dtype="float32", threads=1)
    return build(ModelConfig, "model", {**values, "predictor": None, **fields})


def billions_of(whole: ModelConfig) -> float:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_architecture(whole))
    return sum(p.numel() for p in model.parameters()) / 1e9


@pytest.mark.parametrize("name", REAL)
def test_the_architectures_are_the_published_ones(name):
    *sizes, context, theta, billions = REAL[name]
    whole = config(name, small=False, random_weights=True)
    assert whole.dtype == "bfloat16"
    assert len(str(whole.revision)) == 40
    c = read_architecture(whole)
    found = [c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.hidden_size, c.vocab_size]
    assert found == sizes
    assert (c.max_position_embeddings, c.head_dim, c.rope_parameters["rope_theta"]) == (context, 128, theta)
    kinds = {"r1_llama_8b": "llama3", "r1_0528_qwen3_8b": "yarn"}
    assert c.rope_parameters["rope_type"] == kinds.get(name, "default")
    assert billions_of(whole) == pytest.approx(billions, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "billions", "within", "full", "others", "fixed_mib"),
    [
        # 29 windows of 1024 rows of 2 x 4 x 256 numbers.
        ("gemma3_4b", 3.88, 0.005, 5, ("window", 29), 29 * 1024 * 2 * 4 * 256 * 2 / 2**20),
        # Beside the full layers: 12 windows of 128 rows of 2 x 8 x 64 numbers, 24 of 4096 rows of 2 x 32 x 128.
        ("gpt_oss_20b", 20.9, 0.05, 12, ("window", 12), 12 * 128 * 2 * 8 * 64 * 2 / 2**20),
        ("olmo3_7b_think", 7.3, 0.05, 8, ("window", 24), 24 * 4096 * 2 * 32 * 128 * 2 / 2**20),
        ("qwen3_30b_a3b_thinking", 30.5, 0.05, 48, ("window", 0), 0),
        # 36 states of 32 x 128 x 128 numbers in float32, and of 8192 x 4 inputs of a convolution.
        ("qwen3_next_80b_thinking", 80, 0.5, 12, ("linear", 36), 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2) / 2**20),
    ],
)
def test_models_of_2026_have_the_published_sizes_and_layers(name, billions, within, full, others, fixed_mib):
    whole = config(name, small=False, random_weights=True)
    assert billions_of(whole) == pytest.approx(billions, abs=within)
    spec = read_spec(whole)
    kind, count = others
    assert (spec.layers, spec.layer_kinds.count(kind)) == (full, count)  # type: ignore[arg-type]
    assert fixed_bytes(spec, 2) / 2**20 == fixed_mib


def test_channels_are_the_thinking_and_the_answer_of_gpt_oss():
    model = load_model(config("gpt_oss_20b"))
    text = "<|channel|>analysis<|message|>2+2 is 4<|end|><|start|>assistant<|channel|>final<|message|>4"
    thinking, answer = segment_text(text, model.config.tags)
    assert (text[thinking], text[answer]) == ("2+2 is 4<|end|><|start|>assistant", "4")
    assert model.dialogue.thinking_opened_by == "template"
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    assert model.dialogue.decode([ids[i] for i in model.dialogue.closing_tag(ids)]) == "<|channel|>final<|message|>"


@pytest.mark.parametrize("name", REAL)
def test_a_small_copy_keeps_heads_groups_and_positions(name):
    model = load_model(config(name))
    whole = read_architecture(config(name, small=False, random_weights=True))
    assert model.shape.layers == 2
    assert (model.shape.q_heads, model.shape.kv_heads) == (whole.num_attention_heads, whole.num_key_value_heads)
    assert model.shape.head_dim == 128
    assert model.network.config.rope_parameters == whole.rope_parameters
    text = "Größe of 7?\n"
    ids = model.dialogue.prompt_ids(text)
    assert model.dialogue.decode(list(ids)).endswith("<think>\n")
    assert text in model.dialogue.decode(list(ids))
    assert model.stop_ids == (model.tokenizer.eos_token_id,)
    assert model.dialogue.thinking_opened_by == "template"


def test_a_build_is_named_by_what_it_is_built_of():
    one = config("r1_qwen_7b")
    assert one.identity()["weights"].startswith("random@")
    assert one.identity()["random_weights"] is True
    assert one.describe()["think_start"] == "<think>"
    other = replace(one, config={**dict(one.config or {}), "num_hidden_layers": 3})
    assert one.identity() != other.identity()
    real = config("r1_qwen_7b", small=False)
    assert real.identity()["weights"].startswith("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B@916b56a4")


def test_thinking_is_forced_where_the_template_does_not_open_it():
    forced = load_model(config("r1_llama_8b"))
    template = forced.tokenizer.chat_template
    forced.tokenizer.chat_template = template.replace("<think>\n", "")
    assert forced.dialogue.decode(list(forced.dialogue.prompt_ids("?"))).endswith("<｜Assistant｜><think>\n")
    assert forced.dialogue.thinking_opened_by == "forced"
    free = load_model(config("r1_llama_8b", force_think=False))
    free.tokenizer.chat_template = template.replace("<think>\n", "")
    assert free.dialogue.decode(list(free.dialogue.prompt_ids("?"))).endswith("<｜Assistant｜>")
    assert free.dialogue.thinking_opened_by == "model"
    assert forced.config.identity() != free.config.identity()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"config": {"hidden_size": 8}}, "model_type"),
        ({"config": {**SMALL, "model_type": "nonsense"}}, "nonsense"),
        ({"config": {**SMALL, "model_type": "llama", "vocab_size": 20}}, "embeds 20 tokens"),
        ({"special_tokens": {"bos": "<s>"}}, "model.special_tokens"),
        ({"think_end": " "}, "model.think_end"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(fields, part):
    with pytest.raises(UserError, match=part) as refused:
        load_model(config("r1_qwen_7b", **fields))
    assert "\n" not in str(refused.value)


SMALL_COPY = [
    "model.random_weights=true",
    "model.dtype=float32",
    "model.threads=1",
    *(f"model.config.{name}={value}" for name, value in SMALL.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize("short", ["qwen", "llama"])
def test_the_papers_heatmap_runs_scaled_down(short, kvsweep, write_problems, tmp_path):
    """The experiment as it stands, with overrides alone: small copies, tiny budgets, two problems."""
    from kvsweep.compression.recorders import ImportancePredictor, save_predictor

    save_predictor(ImportancePredictor(128, (16, 8)), tmp_path / "predictor", {"made_for": "tests"})
    problems = write_problems([{"id": i, "problem": f"What is {i}+{i}?", "answer": 2 * i} for i in range(3)])
    ended = kvsweep(
        f"experiment=heatmap_r1_{short}",
        *SMALL_COPY,
        f"model.predictor={tmp_path / 'predictor'}",
        f"benchmark.path={problems}",
        "benchmark.limit=2",
        "draws=2",
        "decoding.max_new_tokens=60",
        "policy.budget=48",
        "grid.keep_ratio=[0.2,0.5]",
        "grid.local_window=[8,16]",
        f"results_dir={tmp_path}",
    )
    assert ended.code == 0, ended.err
    run = tmp_path / f"heatmap_r1_{short}"
    cells = [yaml.safe_load(path.read_text()) for path in run.glob("*/cell.yaml")]
    assert len(cells) == 1 + 4
    assert all(cell["model"]["random_weights"] is True for cell in cells)
    assert all('"random_weights": true' in path.read_text() for path in run.glob("*/provenance.json"))
    assert all('"thinking_opened_by": "template"' in path.read_text() for path in run.glob("*/provenance.json"))
    assert len(list(run.glob("*/DONE"))) == 5
    assert any('"evictions":[{' in path.read_text() for path in run.glob("*/completions.jsonl"))


class _Runs:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("safetensors_only", [True, False])
def test_a_pickle_that_runs_code_is_refused_in_a_sentence(safetensors_only, tiny_model_dir, tmp_path):
    folder = pickled(tiny_model_dir, tmp_path, {"x": _Runs(tmp_path / "ran")})
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(of_folder(folder, safetensors_only=safetensors_only))
    assert not (tmp_path / "ran").exists()


def test_a_pickle_of_tensors_loads_where_it_is_asked_for(tiny_model_dir, tmp_path):
    whole = load_model(of_folder(tiny_model_dir)).network.state_dict()
    found = load_model(of_folder(pickled(tiny_model_dir, tmp_path, dict(whole)), safetensors_only=False))
    assert all(torch.equal(value, whole[name]) for name, value in found.network.state_dict().items())


@pytest.fixture
def folder(tiny_model_dir, tmp_path) -> Path:
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def test_a_model_without_an_end_token_is_refused(folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        kept = {key: value for key, value in values.items() if not key.startswith("eos_token")}
        (folder / name).write_text(json.dumps(kept))
    with pytest.raises(UserError, match="names no end token"):
        load_model(of_folder(folder, dtype="float32"))


@pytest.mark.parametrize("damage", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_of_a_model_is_one_sentence(damage, folder):
    (folder / damage).write_bytes((folder / damage).read_bytes()[:50])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(of_folder(folder))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("model.layers.1.mlp.up_proj.weight", "lacks tensors of"),
        ("model.layers.1.self_attn.o_proj.bias", "has tensors that are not of"),
    ],
)
def test_a_checkpoint_of_other_tensors_than_the_models_is_refused(name, fault, folder):
    """Transformers draws a missing tensor at random and leaves out one that has no place, with a warning alone."""
    values = load_file(folder / "model.safetensors")
    if values.pop(name, None) is None:
        values[name] = torch.ones(32)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"the checkpoint {fault} the model, 1 with {name}"):
        load_model(of_folder(folder))


TEXT = {
    "vocab_size": 280,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "initializer_range": 0.2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 512,
}
SEEING = {
    "gemma3": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "qwen3_5": {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
}
SEEING["qwen3_5_moe"] = SEEING["qwen3_5"]
ATTENTION = {"gemma3": ["full", "sliding", "full"]}


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.slow_unless(rule=lambda family: family == "gemma3")
def test_the_text_model_of_a_multimodal_checkpoint_writes_what_the_whole_one_writes(family, folder):
    kinds = [f"{kind}_attention" for kind in ATTENTION.get(family, ["linear", "full", "linear"])]
    parts = {"text_config": {**TEXT, "layer_types": kinds}, "vision_config": SEEING[family]}
    whole = AutoConfig.for_model(family, **parts, tie_word_embeddings=family != "qwen3_5")
    torch.manual_seed(0)
    network = AutoModelForImageTextToText.from_config(whole).eval()
    network.save_pretrained(folder)
    network = get_peft_model(network, LoraConfig(target_modules=["k_proj", "o_proj"], init_lora_weights=False)).eval()
    network.save_pretrained(folder / "adapter")
    tags = {"think_start": None, "think_end": None}
    model = load_model(of_folder(folder, adapter=str(folder / "adapter"), **tags))
    assert model.spec.layer_kinds.count("full") == kinds.count("full_attention")
    check_exact(model)
    model.network.set_attn_implementation("sdpa")
    ids = torch.randint(3, 270, (1, 60))
    found, expected = (each(input_ids=ids, use_cache=False).logits for each in (model.network, network))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_code_beside_a_model_is_not_run(folder, tmp_path):
    described = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({**described, "model_type": "own", "auto_map": own}))
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(UserError, match="model=tiny"):
        load_model(of_folder(folder))
    assert not (tmp_path / "ran").exists()


def of_folder(folder: Path, **fields: Any) -> ModelConfig:
    return ModelConfig(name="tiny", title="Tiny", path=str(folder), threads=1, **fields)


def pickled(model: Path, folder: Path, values: Any) -> Path:
    """A copy of the model's folder with a pickle of the values in place of its safetensors."""
    shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(values, folder / "model/pytorch_model.bin")
    return folder / "model"


@pytest.mark.parametrize(
    ("threads", "granted", "per_thread", "expected"),
    [
        (None, 3, 32_000_000, 1),
        (None, 3, 2_000_000, 2),
        (None, 3, 10, 3),
        (2, 3, 10, 2),
        (None, 1, 10, 1),
        (2, 1, 10, 2),
    ],
)
def test_threads_follow_the_size_of_the_model_and_the_cores(threads, granted, per_thread, expected, monkeypatch):
    """A model of 2 to 4 million parameters on a machine of three cores, of which a container may grant one."""
    before = torch.get_num_threads()
    monkeypatch.setattr(load, "_MOST_THREADS", 3)
    monkeypatch.setattr(load, "granted_cores", lambda: granted)
    monkeypatch.setattr(load, "_PARAMETERS_PER_THREAD", per_thread)
    try:
        network = load_model(config("qwen3_4b", threads=threads)).network
        assert torch.get_num_threads() == expected
        assert 2_000_000 < sum(p.numel() for p in network.parameters()) < 4_000_000
    finally:
        torch.set_num_threads(before)


TOY = ModelConfig(name="toy_llama", title="Toy", path=str(WEIGHTS / "toy_llama"), threads=1)
RANK, ALPHA = 3, 12
TARGETS = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def plain_model():
    return load_model(TOY)


@pytest.fixture
def adapter(plain_model, tmp_path) -> Path:
    """An adapter of random factors for two projections of each layer, in the files that peft writes."""
    generator, factors = torch.Generator().manual_seed(1), {}
    for name, weight in plain_model.network.named_parameters():
        if name.removesuffix(".weight").endswith(TARGETS):
            for part, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                key = f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"
                factors[key] = 0.05 * torch.randn(shape, generator=generator)
    write(tmp_path, factors)
    return tmp_path


def write(folder: Path, factors: dict[str, torch.Tensor], **fields):
    card = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "lora_dropout": 0.0}
    card |= {"target_modules": [*TARGETS], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(card))
    save_file(factors, folder / "adapter_model.safetensors")


def factors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_the_sum_computes_what_the_two_branches_compute(plain_model, adapter):
    """The definition of LoRA: each adapted projection adds alpha / r · B A x to its own output."""
    merged, factors = load_model(replace(TOY, adapter=str(adapter))), factors_of(adapter)
    ids = torch.arange(5, 25)[None]

    def branch(name):
        down, up = (factors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")

        def added(module, inputs, output):
            return output + ALPHA / RANK * functional.linear(functional.linear(inputs[0], down), up)

        return added

    modules = dict(plain_model.network.named_modules())
    handles = [modules[n].register_forward_hook(branch(n)) for n in modules if n.endswith(TARGETS)]
    assert len(handles) == 2 * plain_model.spec.layers
    with torch.inference_mode():
        expected = plain_model.network(ids).logits
        for handle in handles:
            handle.remove()
        untouched = plain_model.network(ids).logits
        found = merged.network(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untouched).abs().max() > 0.1


def test_the_identity_is_that_of_weights_and_adapter(adapter, tmp_path):
    without, with_it = TOY.identity()["weights"], replace(TOY, adapter=str(adapter)).identity()["weights"]
    factors = factors_of(adapter)
    write(adapter, {name: 2 * value for name, value in factors.items()})
    doubled = replace(TOY, adapter=str(adapter)).identity()["weights"]
    write(adapter, factors, lora_alpha=2 * ALPHA)
    other_scale = replace(TOY, adapter=str(adapter)).identity()["weights"]
    assert len({without, with_it, doubled, other_scale}) == 4
    assert set(replace(TOY, adapter=str(adapter)).files()) > set(TOY.files())


def test_a_place_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no adapter"):
        replace(TOY, adapter=str(tmp_path)).identity()


def test_random_weights_take_no_adapter(adapter):
    with pytest.raises(UserError, match=r"model.adapter belongs to trained weights"):
        replace(TOY, adapter=str(adapter), random_weights=True)


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"r": 0},
        {"r": "three"},
        {"target_modules": ["none"]},
        "a weight more",
        "a factor less",
        "another shape",
    ],
)
def test_an_adapter_of_another_kind_or_model_is_refused(adapter, change):
    factors = factors_of(adapter)
    first = min(factors)
    if change == "a weight more":
        factors |= {f"base_model.model.no.lora_{part}.weight": torch.zeros(RANK, RANK) for part in "AB"}
    elif change == "a factor less":
        del factors[first]
    elif change == "another shape":
        factors[first] = torch.zeros(RANK, 7)
    write(adapter, factors, **(change if isinstance(change, dict) else {}))
    with pytest.raises(UserError, match=r"model.adapter=\S+ cannot be added to the weights"):
        load_model(replace(TOY, adapter=str(adapter)))


@pytest.mark.parametrize("part", ["model.embed_tokens", "lm_head"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_the_embedding_is_pefts_or_refused(part, tied, tmp_path):
    """Merged into a tensor that is embedding and head, an adapter of one would change the other."""
    network = AutoModelForCausalLM.from_pretrained(str(TOY.path), dtype=torch.float32)
    if not tied:
        network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.detach().clone())
        network.config.tie_word_embeddings = False
    shutil.copytree(str(TOY.path), tmp_path / "m")
    network.save_pretrained(tmp_path / "m")
    trained = get_peft_model(network, LoraConfig(r=2, target_modules=[part.rpartition(".")[2]], task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, value in trained.named_parameters():
        if "lora_" in name:
            value.data.normal_()
    trained.save_pretrained(tmp_path / "a")
    config = replace(TOY, path=str(tmp_path / "m"), adapter=str(tmp_path / "a"))
    if tied:
        with pytest.raises(UserError, match="merged, its logits are others"):
            load_model(config)
        return
    ids = torch.tensor([[5, 9, 20, 33]])
    with torch.inference_mode():
        theirs = trained.eval()(input_ids=ids).logits
        ours = load_model(config).network(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_librarys_warning_is_a_note(adapter, capsys):
    write(adapter, factors_of(adapter), gain=3.0)  # a field of another version of peft
    load_model(replace(TOY, adapter=str(adapter)))
    assert capsys.readouterr().err.count("gain") == 1


def test_another_chat_template_beside_an_adapter_is_refused(adapter):
    (adapter / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="another chat template"):
        load_model(replace(TOY, adapter=str(adapter)))


def test_an_adapter_beside_the_weights_is_named(adapter, tmp_path):
    shutil.copytree(str(TOY.path), tmp_path / "m")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, tmp_path / "m")
    with pytest.raises(UserError, match="has a LoRA adapter beside its weights"):
        load_model(replace(TOY, path=str(tmp_path / "m")))
