"""Every family of transformers' causal language models, tiny: decoded as its own code decodes it, or refused.

Each configuration has windows, rotary embeddings and tables of positions so small that the texts grow past them.
"""

import copy
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvsweep.compression.cache import SLOT_ATTENTION
from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, DecodingConfig, Request, SamplingConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.spec import FAMILIES, ModelSpec, read_architecture
from kvsweep.messages.errors import UserError

NEW, PROMPTS = 14, (5, 12, 9)
TOKENS = {"bos": "<s>", "eos": "</s>", "user": "<u>", "assistant": "<a>"}
# The fields of all families; each takes those that it knows.
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 512,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "ffn_dim": 48,
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=8)
LINEAR = rope("linear", factor=2.0)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
DYNAMIC = rope("dynamic", factor=2.0)
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 9.0]}
LONGROPE = rope("longrope", **FACTORS, original_max_position_embeddings=10)
ONE, MQA, MHA = {"num_hidden_layers": 1}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}
WIDE, TIED, BIAS = {"head_dim": 16}, {"tie_word_embeddings": True}, {"attention_bias": True}
ROPES = {"yarn": YARN, "linear rope": LINEAR, "llama3 rope": LLAMA3}
HEADS = {"one layer": ONE, "one kv head": MQA, "as many kv heads": MHA}
FULL2 = {"layer_types": ["full_attention"] * 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
WINDOW = {"sliding_window": 8}
GEMMA = {"query_pre_attn_scalar": 8}

DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


def layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


ATTENTION, DELTA_RULE, CONV = "full_attention", "linear_attention", "conv"

EXACT: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {**HEADS, **ROPES, "wide heads": WIDE, "tied": TIED, "biases": {**BIAS, "mlp_bias": True}}
    | {
        "gelu": {"hidden_act": "gelu"},
        "3 heads": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3},
    },
    "qwen2": {**HEADS, "yarn": YARN, "tied": TIED, "windows off": {"use_sliding_window": False, "sliding_window": 8}}
    | {"windows": {**WINDOWS, "max_window_layers": 0}},
    "qwen3": {
        **HEADS,
        "yarn": YARN,
        "wide heads": WIDE,
        "biases": BIAS,
        "windows": {**WINDOWS, "max_window_layers": 1},
    },
    "qwen2_moe": {"plain": {}, "dense layers": {"decoder_sparse_step": 2}},
    "qwen3_moe": {"plain": {}, "normed": {"norm_topk_prob": True}, "windows off": {"use_sliding_window": False}}
    | {"windows": WINDOWS},
    "mistral": {
        "windows": WINDOW,
        "no window": {"sliding_window": None},
        "wide heads": {"sliding_window": None, **WIDE},
    }
    | {"a window beyond all positions": {"sliding_window": 512}},
    "mixtral": {
        "windows": WINDOW,
        "no window": {"sliding_window": None},
        "one kv head": {"sliding_window": None, **MQA},
    },
    "ministral": {"full layers": FULL2, "windows": MIXED},
    "ministral3": {"plain": {"sliding_window": None}, "windows": WINDOW},
    "phi": {"plain": {}, "normed heads": {"qk_layernorm": True}, "partial rope": {"partial_rotary_factor": 0.25}},
    "phi3": {"no window": {"sliding_window": None}, "as many kv heads": {"sliding_window": None, **MHA}}
    | {"windows": WINDOW},
    "phimoe": {"no window": {"sliding_window": None}, "windows": WINDOW},
    "gemma": {"plain": {}, "one kv head": MQA, "wide heads": WIDE},
    "gemma2": {"softcap": {**FULL2, **GEMMA, "attn_logit_softcapping": 5.0}, "windows": {**MIXED, **GEMMA}},
    "gemma3_text": {"windows": {**MIXED, **GEMMA}, "full layers": {**FULL2, **GEMMA}},
    "gpt_oss": {"sinks and windows": MIXED, "sinks": FULL2},
    "granite": {"scalings": {"logits_scaling": 8.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3}}
    | {"embeddings": {"embedding_multiplier": 12.0, "logits_scaling": 0.25}},
    "granitemoe": {"scalings": {"logits_scaling": 6.0, "attention_multiplier": 0.2}},
    "granitemoeshared": {"scalings": {"logits_scaling": 6.0, "shared_intermediate_size": 16}},
    "cohere": {"plain": {}, "scale": {"logit_scale": 2.0}, "normed heads": {"use_qk_norm": True}},
    "cohere2": {"full layers": FULL2, "windows": MIXED},
    "hyperclovax": {"plain": {}, "scalings": {"logits_scaling": 8.0}},
    "nanochat": {"softcap": {"final_logit_softcapping": 3.0}},
    "olmo": {"plain": {}, "clipped": {"clip_qkv": 0.5}},
    "olmo2": {"plain": {}, "one kv head": MQA},
    "olmo3": {"full layers": FULL2, "windows": MIXED},
    "olmoe": {"plain": {}},
    "exaone4": {"full layers": {**FULL2, "sliding_window": None}, "windows": MIXED},
    "starcoder2": {"no window": {"sliding_window": None}, "no biases": {"sliding_window": None, "use_bias": False}}
    | {"windows": WINDOW},
    "smollm3": {"plain": {}, "a layer without rope": {"no_rope_layers": [1, 0]}}
    | {"windows": {**MIXED, "use_sliding_window": True}},
    "glm4_moe": {"plain": {}, "normed heads": {"use_qk_norm": True}},
    "seed_oss": {"plain": {}, "output bias": {"attention_out_bias": True}},
    "gpt2": {"plain": {}, "unscaled": {"scale_attn_weights": False}, "tied not": {"tie_word_embeddings": False}},
    "gpt_bigcode": {"one kv head": {}, "as many kv heads": {"multi_query": False, "num_key_value_heads": 4}},
    "qwen3_next": {
        "linear first and last": {**DELTA, **layers(DELTA_RULE, ATTENTION, DELTA_RULE)},
        "linear between": {**DELTA, **layers(ATTENTION, DELTA_RULE, ATTENTION)},
    },
    **{
        f: {"linear first and last": {**DELTA, **layers(DELTA_RULE, ATTENTION, DELTA_RULE)}}
        for f in ("qwen3_5_text", "qwen3_5_moe_text")
    },
    **{f: {"convolutions first and last": layers(CONV, ATTENTION, CONV)} for f in ("lfm2", "lfm2_moe")},
    "gpt_neox": {"parallel": {}, "sequential": {"use_parallel_residual": False}, "linear rope": LINEAR},
    "hunyuan_v1_dense": {"plain": {}},
    **{family: {"plain": {}} for family in ("apertus", "arcee", "aria_text", "bitnet", "dots1")},
    **{family: {"plain": {}} for family in ("ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "helium")},
    **{family: {"plain": {}} for family in ("hunyuan_v1_moe", "hy_v3", "internlm3", "iquestcoder", "jais2")},
    **{family: {"plain": {}} for family in ("minimax_m2", "persimmon", "solar_open")},
}
# Texts of 26 tokens are refused; those of 10 are exact.
LIMITED: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"dynamic rope": {**DYNAMIC, "max_position_embeddings": 10}, "longrope": LONGROPE},
    "phi3": {
        "longrope": {**LONGROPE, "sliding_window": None, "original_max_position_embeddings": 10},
        "longrope with a far window": {**LONGROPE, "sliding_window": 999, "original_max_position_embeddings": 10},
    },
    "mistral": {"a window of all positions": {"sliding_window": 10, "max_position_embeddings": 10}},
    "gpt2": {"a short table": {"n_positions": 10}},
}
REFUSED: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "gemma3_text": {"both directions": ({**MIXED, "use_bidirectional_attention": True}, "attention to later tokens")},
    "llama": {"chunks": ({"attention_chunk_size": 8}, "attention in chunks")},
    "gpt2": {
        "a scaling per layer": ({"scale_attn_by_inverse_layer_idx": True}, "another scaling in each layer"),
        "cross attention": ({"add_cross_attention": True}, "cross attention"),
    },
}


def described(family: str, fields: dict[str, Any], device: str = "cpu") -> ModelConfig:
    """The configuration of a tiny model of the family."""
    default = AutoConfig.for_model(family)
    known = {
        name: value for name, value in TINY.items() if hasattr(default, name) and name not in default.attribute_map
    }
    config = {**known, **fields, "model_type": family}
    shared = {"path": "", "random_weights": True, "special_tokens": TOKENS, "threads": 1}
    shared["device"] = device
    return ModelConfig(name=family, title=family, config=config, **shared)


def loaded(family: str, fields: dict[str, Any], device: str = "cpu") -> LoadedModel:
    """A tiny model of the family with weights, the same on each device, that make texts depend on every one of them."""
    model = load_model(described(family, fields, device))
    if device != "cpu":
        model.network.load_state_dict(loaded(family, fields).network.state_dict())
        return model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.network.parameters():  # in place, since fused weights share their memory
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model


def test_loading_changes_no_identity():
    """transformers writes into the dictionaries of rotary embeddings that a config is built of."""
    for family in ("llama", "gpt_neox"):
        config = described(family, LINEAR)
        before = copy.deepcopy(config.identity())
        load_model(config)
        assert config.identity() == before


def decode(model: LoadedModel, slots: int, new: int, prompts: tuple[int, ...]) -> tuple[list[list[int]], torch.Tensor]:
    """The tokens of greedy completions, and the logits of all steps."""
    engine, requests = prepared(model, slots, new, prompts, None)
    logits: list[torch.Tensor] = []
    forward = engine._forward
    engine._forward = lambda: logits.append(forward()) or logits[-1]  # type: ignore[method-assign,func-returns-value]
    ended = {c.problem_id: c.token_ids for _, c in engine.generate(requests)}
    return [[*r.prompt_ids, *ended[r.problem_id]] for r in requests], torch.cat(logits)


def prepared(
    model: LoadedModel, slots: int, new: int, prompts: tuple[int, ...], invariant: bool | None
) -> tuple[Engine, list[Request]]:
    branch = Branch(cell_id="full", policy=FullCache(name="full"))
    ids = [tuple((7 * i * n + i + n) % 250 for i in range(n)) for n in prompts]
    requests = [
        Request(problem_id=str(number), draw=0, prompt_ids=i, branches=(branch,)) for number, i in enumerate(ids)
    ]
    decoding = DecodingConfig(name="greedy", max_new_tokens=new, sampling=SamplingConfig(temperature=0))
    engine = Engine.sized_for(requests, model, decoding=decoding, seed=0, slots=slots, invariant=invariant)
    return engine, requests


def bits(model: LoadedModel, slots: int, texts: int = 64) -> dict[tuple[str, int], bytes]:
    """The logits of each token of texts of several lengths, bit for bit, as decoded over so many slots."""
    engine, requests = prepared(model, slots, 6, tuple(5 + number % 9 for number in range(texts)), True)
    found: dict[tuple[str, int], bytes] = {}
    forward = engine._forward

    def noted():
        logits, table = forward(), engine.table
        for slot in range(engine.cache.live):
            found[table[slot].request.problem_id, int(table.positions[slot])] = logits[slot].numpy().tobytes()
        return logits

    engine._forward = noted  # type: ignore[method-assign]
    for _ in engine.generate(requests):
        pass
    return found


class InFloat64(TorchFunctionMode):
    """Also computes in float64 what a model's code converts to float32, as it does norms and linear layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return func(*args, **kwargs)


def float64_copy(model: LoadedModel) -> Any:
    """A model's network in float64, to be called within `InFloat64`."""
    network = copy.deepcopy(model.network).double()
    network.set_experts_implementation("eager")  # the other one multiplies no float64
    return network


def exact_steps(model: LoadedModel, text: list[int], prompt: int) -> torch.Tensor:
    """The logits in float64 of each token behind the prompt, read one by one as `generate` reads them."""
    network, cache = float64_copy(model), model.new_cache()
    network.set_attn_implementation("eager")
    with InFloat64(), torch.inference_mode():
        found = [network(input_ids=torch.tensor([text[:prompt]]), past_key_values=cache).logits[0, -1]]
        for token in text[prompt:-1]:
            found.append(network(input_ids=torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack(found)


def check_distance(found: torch.Tensor, own: torch.Tensor, exact: torch.Tensor):
    """Logits [tokens, vocabulary] in float32 are about as far from float64 as those of transformers' own code.

    Both round everywhere, in another order, and how far that carries depends on the processor: the logits of a token
    whose experts nearly tie may be 50 times as far as the others'. So the median of the tokens is compared. A wrong row
    would make a difference of the size of the logits, which no token may have.
    """
    ours, theirs = ((logits - exact).square().mean(-1).sqrt() for logits in (found, own))
    near = 1e-3 * exact.std()
    assert ours.median() <= 3 * theirs.median(), (ours.median(), theirs.median())
    assert ours.max() <= max(3 * theirs.max(), near), (ours.max(), theirs.max(), near)
    assert theirs.median() <= near, (theirs.median(), near)


def check_exact(model: LoadedModel, new: int = NEW, prompts: tuple[int, ...] = PROMPTS):
    texts, logits = decode(model, 1, new, prompts)
    together, _ = decode(model, 3, new, prompts)
    assert together == texts
    network = model.network
    # Gemma 2 and gpt-oss know no other; elsewhere both have the same logits.
    network.set_attn_implementation("sdpa" if network._supports_sdpa else "eager")
    own = []
    how = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": list(model.stop_ids)}
    with torch.inference_mode():
        for text, prompt in zip(texts, prompts, strict=True):
            if not own or model.spec.states:
                ids = torch.tensor([text[:prompt]])
                made = network.generate(ids, **how, return_dict_in_generate=True, output_logits=True)
                assert made.sequences[0].tolist() == text
            # A linear layer that reads a whole text rounds otherwise than its recurrent form, which `generate` takes.
            whole = network(input_ids=torch.tensor([text]), use_cache=False).logits[0, prompt - 1 : -1]
            own.append(torch.cat(made.logits) if model.spec.states else whole)
    network.set_attn_implementation(SLOT_ATTENTION)
    if model.spec.states:  # which carry the rounding of every step before: both sides are held against float64
        exact = torch.cat([exact_steps(model, text, n) for text, n in zip(texts, prompts, strict=True)])
        check_distance(logits, torch.cat(own), exact)
    else:
        torch.testing.assert_close(logits, torch.cat(own), rtol=1e-4, atol=1e-4 * float(torch.cat(own).std()))
    assert [t for text, n in zip(texts, prompts, strict=True) for t in text[n:]] == torch.cat(own).argmax(-1).tolist()


def cases(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(family, fields, id=f"{family}-{name}")
        for family, variants in table.items()
        for name, fields in variants.items()
    ]


@pytest.mark.parametrize(("family", "fields"), cases(EXACT))
@pytest.mark.slow_unless(rule=lambda family, fields: list(EXACT).index(family) % 20 == 0)
@pytest.mark.release_unless(rule=lambda family, fields: fields is next(iter(EXACT[family].values())))
def test_a_family_is_decoded_as_its_own_code_decodes_it(family, fields):
    check_exact(loaded(family, fields))


def particular(family: str) -> LoadedModel:
    """The family's first configuration with other layers than full attention, or without one its first."""
    variants = list(EXACT[family].values())
    specs = (ModelSpec.of(read_architecture(described(family, fields))) for fields in variants)
    found = (fields for fields, spec in zip(variants, specs, strict=True) if set(spec.layer_kinds) != {"full"})
    return loaded(family, next(found, variants[0]))


@pytest.mark.parametrize("family", EXACT)
@pytest.mark.slow_unless(rule=lambda family: list(EXACT).index(family) % 20 == 1)
@pytest.mark.one_in(3)
def test_bits_do_not_depend_on_the_slots_or_invariance_is_refused(family):
    model = particular(family)
    if model.spec.experts:
        with pytest.raises(UserError, match=f"invariant=true cannot hold for the experts of model type {family}"):
            bits(model, 1)
        return
    together = bits(model, 64)
    assert len(together) > 300
    assert bits(model, 7) == together
    alone = bits(model, 1, texts=12)
    assert len(alone) > 60
    assert alone.items() <= together.items()


@pytest.mark.parametrize(("family", "fields"), cases(LIMITED))
def test_texts_beyond_a_models_positions_are_refused(family, fields):
    model = loaded(family, fields)
    check_exact(model, 4, (3, 6, 5))
    with pytest.raises(UserError, match=r"up to 10 alone: lower decoding\.max_new_tokens|up to 512 alone"):
        decode(model, 1, 520, (5,))
    with pytest.raises(UserError, match="a text may take 11 tokens"):
        decode(model, 1, 5, (6,))


@pytest.mark.parametrize(("family", "fields"), cases(REFUSED))
def test_what_a_slot_cache_cannot_serve_is_refused(family, fields):
    with pytest.raises(UserError, match=fields[1]) as refused:
        loaded(family, fields[0])
    assert family in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_other_families_are_refused_by_name():
    others = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - FAMILIES
    assert len(others) > 100
    for family in others:
        with pytest.raises(UserError, match=f"model type {family} has no proof") as refused:
            ModelSpec.of({"model_type": family})
        assert "\n" not in str(refused.value)


def lines() -> str:
    """The lines of `kvsweep models`: each family with what was decoded, limited to some length, and refused."""
    rows = []
    for family in sorted(EXACT):
        row = f"{family}: {', '.join(EXACT[family])}"
        for heading, variants in (("up to a length", LIMITED), ("refused", REFUSED)):
            if family in variants:
                row += f"; {heading}: {', '.join(variants[family])}"
        rows.append(row)
    return "\n".join(rows)


def test_the_command_prints_these_cases(kvsweep):
    assert lines() in kvsweep("models").out, f"put these lines into harness/models/families.txt:\n{lines()}"


def test_the_cases_are_all_families_and_more_than_a_hundred_configurations():
    assert set(EXACT) == FAMILIES
    assert sum(map(len, [*EXACT.values(), *LIMITED.values(), *REFUSED.values()])) > 100
