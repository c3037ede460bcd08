"""Nothing of an engine's memory is left behind it, and the bytes of a slot are known before they are allocated."""

import gc
import re
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import CacheShape
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.window import Window
from kvsweep.harness.decode import memory
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import DecodingConfig, SamplingConfig
from kvsweep.harness.decode.sampling import cuts
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.settings import compose_config
from kvsweep.harness.sweep.execute import decode_all
from kvsweep.harness.sweep.fill import loaded
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.share import share_of
from kvsweep.kernels.sampling import inverse_cdf
from tests.harness.decode.fakes import ask

GIB = 2**30
R1_QWEN = CacheShape(layers=28, q_heads=28, kv_heads=4, head_dim=128, dtype=torch.bfloat16)
GRID = ["benchmark=toy_add", "grid.policy=[full,h2o,tova,random]", "policy.budget=64", "policy.local_window=8"]


class Allocated(TorchDispatchMode):
    """Counts the bytes of the storages that torch's operations make, now and at most."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    @property
    def now(self) -> int:
        return sum(self.sizes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, self.now)
        return result


@pytest.fixture
def caches(monkeypatch) -> Iterator[list["weakref.ref[SlotCache]"]]:
    """Weak references to the caches that are made from now on; Python's collector is off."""
    made, begin = [], SlotCache.__init__

    def init(self, *args: Any, **options: Any):
        begin(self, *args, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(SlotCache, "__init__", init)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


def alive(caches: Sequence["weakref.ref[SlotCache]"]) -> list[SlotCache]:
    return [cache for made in caches if (cache := made()) is not None]


@pytest.mark.parametrize(
    "settings", [[], ["cache.bits=4", "cache.group=8"], ["cache.bits=4", "cache.scheme=kivi", "cache.group=8"]]
)
@pytest.mark.slow_unless(rule=lambda settings: not settings)
def test_no_cache_outlives_its_group(settings, caches, tiny, tmp_path):
    job = make_job(compose_config(*tiny, *GRID, *settings, f"results_dir={tmp_path}"))
    assert decode_all([share_of(job)]) == []
    assert len(caches) > 2, "two groups, and the bytes of a slot"
    assert alive(caches) == []


def test_no_cache_outlives_an_error(caches, tiny, tmp_path, monkeypatch):
    def fail(self, hidden, linear):
        raise ArithmeticError("no logits")

    job = make_job(compose_config(*tiny, *GRID, f"results_dir={tmp_path}"))
    loaded(job.model)
    monkeypatch.setattr(LoadedModel, "logits", fail)
    [error] = decode_all([share_of(job)])
    assert "no logits" in str(error)
    del error
    assert alive(caches) == []


@pytest.mark.slow
def test_the_second_group_gets_the_memory_of_the_first(
    caches,
    tiny,
    tmp_path,
    monkeypatch,
    capsys,
):
    """A device whose memory holds three slots of the full cache."""

    def free(device):
        return 400_000 - sum(tensor.nbytes for cache in alive(caches) for tensor in cache.tensors)

    monkeypatch.setattr(memory, "free_memory", free)
    monkeypatch.setattr(memory, "step_bytes", lambda spec: 0)
    job = make_job(compose_config(*tiny, *GRID, "draws=4", f"results_dir={tmp_path}"))
    assert decode_all([share_of(job)]) == []
    said = [line for line in capsys.readouterr().out.splitlines() if " slots x " in line]
    found = [re.search(r"(\d+) slots x .*\((\d+) of ([\d.]+) MiB, ", line) for line in said]
    assert len(found) == 2
    for one in found:
        assert one is not None, said
        assert int(one[1]) == int(one[2]) == int(0.8 * 400_000 / 2**20 / float(one[3])), said


def decoding(tokens: int, **options: Any) -> DecodingConfig:
    return DecodingConfig(name="d", max_new_tokens=tokens, sampling=SamplingConfig(temperature=0.6), **options)


def test_an_h100_holds_192_slots_of_the_papers_heatmap():
    """Beside R1-Distill-Qwen-7B, and beside the full cache at the published length."""
    window = Window(name="window", keep_ratio=0.3, local_window=2000, budget=5000)
    spec = SimpleNamespace(vocab_size=152_064)
    free = 0.8 * (79.1 - 0.8 - 14.2) * GIB
    for policy, least in ((window, 180), (FullCache(name="full"), 56)):
        one = memory.slot_bytes(R1_QWEN, ask([(1,) * 36], policy), decoding(16_384), UNPACKED)
        assert free // (one + memory.step_bytes(spec)) >= least  # type: ignore[arg-type]


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("bits", [16, 4])
def test_the_bytes_of_a_slot_are_those_that_torch_allocates(
    bits,
    loops,
    compose,
    tiny,
    write_problems,
    tmp_path,
):
    """For all policies of the methods experiment together and one by one."""
    rows = write_problems([{"id": 1, "problem": "1+1?", "answer": 2}])
    local = [*tiny[:3], f"benchmark.path={rows}", "model.gguf=null", f"results_dir={tmp_path}"]
    small = ["policy.rows=96", "policy.every=32", "policy.local_window=32"]
    job = make_job(compose("experiment=methods_r1_qwen", *local, *small))
    policies = [cell.policy for cell in job.cells if bits == 16 or not cell.policy.per_head]
    for policy in policies:
        policy.load_artifacts()
    config = CacheConfig(bits=bits, group=8, residual=16)  # type: ignore[arg-type]
    model, text = loaded(job.model), decoding(200, stop_on_loop=loops)
    for some in [policies, *([policy] for policy in policies)]:
        requests = ask([(1,) * 20], *some)
        expected, found = memory.slot_bytes(model.shape, requests, text, config), []
        for slots in (2, 5):
            with Allocated() as allocated:
                engine = Engine.sized_for(requests, model, decoding=text, seed=0, slots=slots, cache=config)
                found.append(allocated.now)
            del engine
        assert expected == pytest.approx((found[1] - found[0]) / 3, rel=0.01), some


@pytest.mark.parametrize("sampling", [{"top_p": 0.95}, {"top_p": 0.95, "top_k": 20}, {}, {"temperature": 0}])
def test_drawing_takes_no_more_than_is_set_aside(sampling):
    config = SamplingConfig(**{"temperature": 0.6, **sampling})
    logits, uniforms = torch.randn(4, 30_000).bfloat16(), torch.rand(4)
    with Allocated() as allocated, torch.inference_mode():
        inverse_cdf(logits, uniforms, **cuts(config))
    of_the_network = 4 + logits.itemsize  # the logits themselves, and as float32 where a kernel returns them so
    assert allocated.most / logits.numel() + of_the_network <= memory.BYTES_PER_LOGIT
