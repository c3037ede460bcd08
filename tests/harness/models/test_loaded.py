"""Where thinking and answer begin and end; the bounds of the real texts were read by hand."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvsweep.compression.cache import SlotCache, use_slot_attention
from kvsweep.harness.models.loaded import FusedStep
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.messages.errors import UserError
from kvsweep.run_files.thinking import ThinkTags, segment_text

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


def test_unclosed_is_refused():
    with pytest.raises(UserError, match="row 7 never closes its thinking with </think>"):
        segment_text("<think>a", THINK, name="row 7")


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


SHARED = {
    "vocab_size": 50,
    "hidden_size": 56,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: list[PreTrainedConfig] = [
    Qwen2Config(**SHARED),
    LlamaConfig(**SHARED, head_dim=8, rope_parameters=LLAMA3_ROPE),
    LlamaConfig(**SHARED, attention_bias=True, tie_word_embeddings=True),
    Qwen3Config(**SHARED, head_dim=16),
]


def make(config, dtype=torch.float32):
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in network.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide a wrong use
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 1)
    use_slot_attention(network)
    return network


def steps(network, dtype, step):
    """Hidden states of 12 steps over three slots that stand at different lengths and positions."""
    shape = ModelSpec.of(network.config).cache_shape("float32" if dtype == torch.float32 else "bfloat16")
    cache = SlotCache(shape, slots=4, capacity=40, device=torch.device("cpu"))
    cache.live = 3
    for slot, length in enumerate((0, 5, 17)):
        cache._set_length(slot, length)
    generator = torch.Generator().manual_seed(2)
    for number in range(12):
        tokens = torch.randint(0, 50, (3,), generator=generator)
        positions = torch.tensor([0, 30, 200]) + number
        cache.begin_step(positions)
        yield step(tokens, positions, cache)


def by_modules(network):
    def step(tokens, positions, cache):
        inputs = {"input_ids": tokens[:, None], "position_ids": positions[:, None]}
        return network.base_model(**inputs, past_key_values=cache, slot_cache=cache).last_hidden_state[:, 0]

    return step


@torch.inference_mode()
@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_the_fused_step_is_the_modules_step(config, dtype, tolerance):
    network = make(config, dtype)
    assert ModelSpec.of(network.config).fusable
    expected = list(steps(network, dtype, by_modules(network)))
    fused = list(steps(network, dtype, FusedStep(network)))
    for one, other in zip(fused, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


@torch.inference_mode()
@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
def test_fusing_takes_no_memory_and_leaves_the_modules_as_they_were(config):
    network = make(config)
    ids = torch.randint(0, 50, (2, 9))
    logits, size = network(ids).logits, weight_bytes(network)
    FusedStep(network)
    assert weight_bytes(network) == size
    torch.testing.assert_close(network(ids).logits, logits, atol=0, rtol=0)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
def test_a_network_fused_while_decoding_still_gives_gradients(config):
    network, other = make(config), make(config)
    with torch.inference_mode():
        list(steps(network, torch.float32, FusedStep(network)))
    gradients = []
    for one in (network, other):
        embedded = torch.randn(1, 9, 56, generator=torch.Generator().manual_seed(3)).requires_grad_()
        one(inputs_embeds=embedded).logits[0, -1, 7].backward()
        gradients.append(embedded.grad)
    assert gradients[1].abs().max() > 1e-3
    torch.testing.assert_close(*gradients)


def weight_bytes(network):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in network.parameters()}
    return sum(storages.values())


def test_other_families_are_left_to_their_modules():
    sizes = {**SHARED, "num_key_value_heads": 14}
    assert not ModelSpec.of(PhiConfig(**sizes)).fusable
    assert not ModelSpec.of(LlamaConfig(**SHARED, mlp_bias=True)).fusable
