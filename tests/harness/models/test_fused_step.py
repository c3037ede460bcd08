"""The decode step by Triton in the interpreter beside the one by torch: hidden states, graph nodes, greedy texts.

tests/kernels/test_triton.py starts the process that runs these tests.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, Qwen2Config

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import Prefill
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.snapkv import SnapKV
from kvsweep.harness.decode.request import Branch, Request
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import FusedStep, LoadedModel
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.toy.tasks import problems
from kvsweep.kernels import pointwise
from kvsweep.messages.errors import UserError
from tests.harness.decode.fakes import FULL, run
from tests.harness.models.test_families import described
from tests.harness.models.test_loaded import FAMILIES, SHARED, make
from tests.kernels.interpreter import INTERPRETED

pytest.importorskip("triton")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_triton.py starts")
pytestmark = [pytest.mark.slow, inside]
WINDOWS = Qwen2Config(
    **SHARED,
    use_sliding_window=True,
    sliding_window=8,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
)
PACKED = CacheConfig(bits=8, group=8, residual=4)


def cache_of(network: Any, impl: Any, config: CacheConfig = UNPACKED, rows: int = 40) -> SlotCache:
    """Three slots: two texts of 1 and 17 random rows, and a free one."""
    shape = ModelSpec.of(network.config).cache_shape(str(network.dtype).removeprefix("torch."))
    cache = SlotCache(shape, slots=3, capacity=rows, device=torch.device("cpu"), impl=impl, config=config)
    generator = torch.Generator().manual_seed(1)
    for length in (1, 17):
        prefill = Prefill()
        for kind in shape.layer_kinds:
            pair = torch.randn(2, shape.kv_heads, length, shape.head_dim, generator=generator).to(network.dtype)
            (prefill.rows if kind == "full" else prefill.windows).append((pair[0], pair[1]))
        cache.admit(prefill)
    return cache


def hidden_states(step: FusedStep, cache: SlotCache, count: int) -> Tensor:
    """Last hidden states of `count` steps, [steps, live, hidden_size]."""
    generator, found = torch.Generator().manual_seed(2), []
    for _ in range(count):
        tokens = torch.randint(0, 50, (cache.live,), generator=generator)
        positions = torch.from_numpy(cache.lengths[: cache.live].copy())
        cache.begin_step(positions)
        found.append(step(tokens, positions, cache))
    return torch.stack(found)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("config", "packed"),
    [*((family, UNPACKED) for family in FAMILIES), (WINDOWS, UNPACKED), (FAMILIES[3], PACKED)],
    ids=["qwen2", "llama", "llama with biases", "qwen3", "qwen2 with windows", "qwen3 packed"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)],
    ids=["fp32", "bf16", "fp16"],
)
def test_the_steps_are_those_of_torch(config, packed, dtype, tolerance):
    network = make(config, dtype)
    caches = [cache_of(network, impl, config=packed) for impl in ("torch", "triton")]
    expected, found = (hidden_states(FusedStep(network), cache, 3) for cache in caches)
    assert not torch.equal(found, expected), "computed by the same code"
    assert (found - expected).norm() <= tolerance * expected.norm()


class Nodes(TorchDispatchMode):
    """Counts what a CUDA graph of the work would hold: launches of Triton kernels, and operations that write memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.counts, self._inside = Counter[str](), False
        from triton.runtime import interpreter

        launch, nodes = interpreter.GridExecutor.__call__, self

        def counted(executor, *args: Any, **kwargs: Any):
            nodes.counts[executor.fn.__name__] += 1
            nodes._inside = True  # the interpreter computes with torch's own operations
            launch(executor, *args, **kwargs)
            nodes._inside = False

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        memory = [
            {t.untyped_storage().data_ptr() for t in tree_leaves(tree) if isinstance(t, Tensor)}
            for tree in ((args, kwargs), result)
        ]
        is_view = memory[1] <= memory[0] and not operation._schema.is_mutable
        if not (self._inside or is_view or "empty" in operation.name()):
            self.counts[operation.name()] += 1
        return result


@torch.inference_mode()
def nodes_of_a_layer(monkeypatch: pytest.MonkeyPatch, family: PreTrainedConfig, **how: Any) -> Counter[str]:
    """What a step of a network of three layers launches beyond that of two."""
    found = []
    for layers in (2, 3):
        sizes = {"num_hidden_layers": layers, "layer_types": None, "num_attention_heads": 4}
        network = make(type(family)(**{**family.to_dict(), **sizes}))
        step, cache = FusedStep(network), cache_of(network, "triton", **how)
        with monkeypatch.context() as patch, Nodes(patch) as nodes:
            hidden_states(step, cache, 1)
        found.append(nodes.counts)
    assert not found[0] - found[1]
    return found[1] - found[0]


@pytest.mark.parametrize("config", [FAMILIES[0], FAMILIES[3]], ids=["qwen2", "qwen3"])
def test_graph_nodes_of_a_layer(config, monkeypatch):
    """Nine where there were 21, or 24 with normed heads; ten if slots have several chunks of rows for attention."""
    from kvsweep.kernels.decode_attention import CHUNK

    expected = {"aten::linear": 4, "_attend_chunk": 1, "_add_norm": 2, "_rotate": 1, "_gate": 1}
    assert nodes_of_a_layer(monkeypatch, config, rows=CHUNK.value) == expected
    assert nodes_of_a_layer(monkeypatch, config, rows=CHUNK.value + 1) == {**expected, "_join_chunks": 1}


def test_packed_rows_have_fused_norms_and_gates(monkeypatch):
    nodes = nodes_of_a_layer(monkeypatch, FAMILIES[3], config=PACKED)
    assert (nodes["_add_norm"], nodes["_gate"], nodes["_rotate"]) == (2, 1, 0)


def loaded(family: str) -> LoadedModel:
    """An embedded model, or a random one of a family that no embedded model has."""
    if family in ("toy_qwen", "toy_llama"):
        return load_model(ModelConfig(name=family, title="Toy", path=str(WEIGHTS / family), threads=1))
    return load_model(described(family, {"initializer_range": 0.5, "head_dim": 128}))


@pytest.mark.parametrize("family", ["toy_qwen", "toy_llama", "qwen3"])
def test_greedy_texts_are_those_of_torch(family):
    """Over evictions of a policy that reads attention masses and of one that reads queries."""
    model, rule = loaded(family), {"keep_ratio": 0.4, "local_window": 4, "budget": 24, "question": "free"}
    policies = H2O(name="h2o", **rule), SnapKV(name="snapkv", observation_window=4, **rule)
    branches = tuple(Branch(cell_id=policy.name, policy=policy) for policy in policies)
    prompts = [model.dialogue.prompt_ids(problem.question) for problem in problems("chain")[:1]]
    requests = [
        Request(problem_id=str(number), draw=0, prompt_ids=prompt, branches=branches)
        for number, prompt in enumerate(prompts)
    ]
    options = {"max_new_tokens": 9, "slots": 2}
    found, engine = run(model, requests, impl="triton", **options)
    assert engine.cache.operations.__name__.endswith("triton_kernels")
    assert found == run(model, requests, **options)[0]
    assert all(completion.evictions for completion in found.values())


def test_a_step_that_differs_is_refused_before_anything_is_decoded(monkeypatch):
    from kvsweep.kernels import triton_kernels

    model = loaded("qwen3")
    request = Request(problem_id="a", draw=0, prompt_ids=(5, 6), branches=(Branch(cell_id="full", policy=FULL),))
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "gated", lambda gate_up: 1.1 * pointwise.gated(gate_up))
        with pytest.raises(UserError, match=r"qwen3 has other logits .* with impl=triton: choose impl=torch"):
            run(model, [request], impl="triton", max_new_tokens=1, slots=1)
    run(model, [request], impl="triton", max_new_tokens=1, slots=1)
    assert model.compared == {"torch", "triton"}
