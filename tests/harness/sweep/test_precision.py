"""The keys of `cache`: identity, refusals, the estimate, a run in shards, the mark where nothing is packed."""

import json

import pytest
import yaml

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics
from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import CacheConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec, read_architecture
from kvsweep.harness.settings import WEIGHTS
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import read_rows

DECIDED = "until=decided draws=2 grid.policy=[full,dynts]"
PACKED = ["cache.bits=4", "cache.group=8", "cache.residual=6"]


def completions(folder):
    rows = [row for path in folder.glob("completions*.jsonl") for row in read_rows(path, dict)]
    return sorted(rows, key=lambda row: (row["problem_id"], row["draw"]))


@pytest.mark.slow
def test_packed_cells_have_ids_of_their_own_and_do_not_depend_on_shards(kvsweep, tiny, tiny_policy, tmp_path):
    grid = [*tiny, *tiny_policy, "grid.policy=[full,dynts,random_head]", "draws=2"]
    # At 16 bits the other two settings do nothing.
    assert kvsweep(*grid, f"results_dir={tmp_path}/a", "slots=4").code == 0
    assert "has no effect" in kvsweep(*grid, *PACKED[1:], f"results_dir={tmp_path}/a", "--dry-run").err
    assert kvsweep(*grid, *PACKED, f"results_dir={tmp_path}/a", "slots=4").code == 0
    for shard in ("2/2", "1/2"):
        assert kvsweep(*grid, *PACKED, f"results_dir={tmp_path}/b", "slots=1", f"shard={shard}").code == 0
    cells = {path.parent: yaml.safe_load(path.read_text()) for path in (tmp_path / "a" / "default").glob("*/cell.yaml")}
    packed = [folder for folder, cell in cells.items() if "cache" in cell]
    assert (len(cells), len(packed)) == (6, 3)
    assert len({cell["condition"] for cell in cells.values()}) == 1
    for folder in packed:
        assert cells[folder]["cache"] == {"bits": 4, "group": 8, "residual": 6}
        assert completions(folder) == completions(tmp_path / "b" / "default" / folder.name)
        stats = next(read_rows(folder / "stats.jsonl", dict))
        assert stats["kv_bytes_allocated"] == stats["kv_bytes_analytic"]
        sizes = json.loads((folder / "provenance.json").read_text())["bytes"]
        # Two layers of two heads: keys and values of 4 + 4 bytes, and 6 rows of 8 numbers in float32.
        assert (sizes["row"], sizes["newest"]) == (2 * 2 * 2 * 8, 2 * 2 * 2 * 6 * 32)
    evicted = [folder for folder in packed if any(row["evictions"] for row in completions(folder))]
    assert len(evicted) == 2
    texts = [[row["token_ids"] for row in completions(folder)] for folder, cell in cells.items() if "full" in str(cell)]
    assert texts[0] != texts[1], "the bits act"


# The words after cache.bits=4, and what the sentence names.
REFUSED = {
    "cache.bits=3": "cache.bits=3 is unknown",
    "cache.bits=16 cache.key_bits=4": "cache.key_bits=4 and cache.value_bits=None leave one of the two at 16 bits",
    "cache.key_bits=16": "cache.key_bits=16 is unknown",
    "cache.scheme=kvi": "cache.scheme=kvi is unknown",
    "cache.scheme=kivi cache.group=2": "cache.group=2 does not fill whole words of 4 bytes with 4 bits a number",
    "cache.scheme=kvarn impl=triton": "cache.scheme=kvarn has no Triton kernel",
    "cache.scheme=kivi impl=triton": "cache.scheme=kivi has no Triton kernel",
    "cache.scheme=fp8": "cache.scheme=fp8 takes 8 bits for a number, not cache.bits=4, cache.key_bits=None",
    "cache.bits=null cache.scheme=fp8 cache.value_bits=4": "takes 8 bits for a number, not cache.bits=None",
    "cache.bits=8 cache.scheme=fp8 cache.format=e3m4": "cache.format=e3m4 is unknown",
    "cache.bits=8 cache.scheme=fp8 cache.scale=head": "cache.scale=head is unknown",
    "cache.bits=8 cache.scheme=fp8 cache.scale=tensor": "cache.scales is not set and this model",
    "cache.bits=8 cache.scheme=fp8 cache.scale=tensor cache.scales=/none": "cache.scales=/none holds no scales",
    "cache.bits=8 cache.scheme=fp8 cache.scale=token cache.whole_layers=1": "goes with cache.scale=none",
    "cache.bits=8 cache.scheme=fp8 cache.whole_layers=3": "cache.whole_layers=3 of 3 layers leaves none",
    "cache.bits=8 cache.scheme=fp8 cache.whole_layers=1 impl=triton": "cache.whole_layers=1 has no Triton kernel",
    "cache.whole_layers=1": "cache.scheme=rotated does not take it",
    "cache.bits=8 cache.scheme=fp8 " + DECIDED: "which a job of fp8 e4m3 does not decode",
    "cache.residual=0": "cache.residual=0 cannot be used",
    "cache.group=5": "cache.group=5 does not divide the 32 numbers of a head",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(words, kvsweep, tmp_path):
    ended = kvsweep("cache.bits=4", *words.split(), f"results_dir={tmp_path}")
    assert (ended.code, REFUSED[words] in ended.err) == (2, True), ended.err
    assert not [*tmp_path.rglob("*.lock")]


@pytest.mark.parametrize("head_dim", [24, 80, 96])
def test_a_rotation_needs_heads_of_a_power_of_two(head_dim):
    with pytest.raises(UserError, match=r"cache\.scheme=kvarn needs heads of a power of two"):
        CacheConfig(bits=8, group=8, scheme="kvarn").row_formats(head_dim)
    config = CacheConfig(bits=8, group=8)
    with pytest.raises(UserError, match=rf"cache.scheme=rotated needs heads of a power of two, .* {head_dim} numbers"):
        config.row_formats(head_dim)
    assert CacheConfig(bits=8, group=8, scheme="plain").row_formats(head_dim)


def test_the_short_form_and_the_long_form_name_the_same_cell():
    short = CacheConfig(bits=4).identity()
    assert short == {"cache": {"bits": 4, "group": 32, "residual": 128}}
    assert short == CacheConfig(key_bits=4, value_bits=4).identity()
    assert CacheConfig(bits=4, value_bits=2).identity() == CacheConfig(key_bits=4, value_bits=2).identity() != short
    assert CacheConfig(bits=4, scheme="kivi").identity() != CacheConfig(bits=4, scheme="plain").identity() != short
    assert CacheConfig(scheme="kivi", residual=3).identity() == CacheConfig(bits=16).identity() == {}


def test_the_e4m3_of_triton_needs_a_gpu_that_has_it():
    config = CacheConfig(scheme="fp8")
    with pytest.raises(UserError, match=r"capability 8\.9, and this one has 8\.0: give cache"):
        config.check_implementation("triton", (8, 0))
    for one, impl, capability in ((config, "triton", (9, 0)), (config, "torch", (8, 0)), (config, "triton", None)):
        one.check_implementation(impl, capability)
    CacheConfig(scheme="fp8", format="e5m2").check_implementation("triton", (8, 0))


def test_fp8_is_named_by_format_and_scale_and_by_nothing_that_it_does_not_take():
    own = {"bits": 8, "scheme": "fp8", "format": "e4m3", "scale": "none"}
    assert CacheConfig(scheme="fp8", group=8, residual=3).identity() == {"cache": own}
    assert CacheConfig(bits=8, scheme="fp8", scale="token").identity() == {"cache": own | {"scale": "token"}}
    assert CacheConfig(scheme="fp8", scales="/nowhere").identity() == {"cache": own}
    assert CacheConfig(scheme="fp8", whole_layers=2).identity() == {"cache": own | {"whole_layers": 2}}
    assert CacheConfig(scheme="fp8", scale="token", format="e5m2").title == " fp8 e5m2, a scale per token"


@pytest.mark.slow
def test_an_fp8_sweep_is_stored_reported_and_replayed(kvsweep, tiny, tiny_policy, tmp_path):
    grid = [*tiny, *tiny_policy, "grid.policy=[full,h2o]", f"results_dir={tmp_path}"]
    for cache in (
        [],
        ["cache.scheme=fp8", "cache.whole_layers=1"],
        ["cache.scheme=fp8", "cache.format=e5m2", "cache.scale=token"],
    ):
        ended = kvsweep(*grid, *cache, "replay=true")
        assert ended.code == 0, ended.err
    run = load_run(tmp_path / "default")
    variants = set(run.cells.loc[run.cells["policy"] == "full_packed", "variant"])
    kinds = ("format=e4m3, scale=none, whole_layers=1", "format=e5m2, scale=token, whole_layers=0")
    assert variants == {f"bits=8, scheme=fp8, {kind}" for kind in kinds}
    metrics = cell_metrics(run).set_index("cell_id")
    packed = metrics[metrics["bits"] == 8]
    assert (packed["packed"] == 1).all(), "no row stays in the model's precision"
    assert (packed["kv_bytes_allocated"] == packed["kv_bytes_analytic"]).all()
    for folder in (tmp_path / "default").glob("*/provenance.json"):
        sizes = json.loads(folder.read_text())["bytes"]
        if sizes["row"] != 2 * 2 * 2 * 32:
            assert (sizes["row"], sizes["newest"]) in {(2 * 2 * (8 + 32), 0), (2 * 2 * 2 * 12, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["rotated", pytest.param("kivi", marks=pytest.mark.slow)])
def test_a_cell_in_which_nothing_is_packed_is_marked(scheme, kvsweep, tmp_path):
    """The residual comes with the model; shorter texts than it are not packed, and everything says so."""
    assert "residual: 16\n" in kvsweep("--cfg", "job", "--resolve", "model=toy_qwen").out
    assert "residual: 32\n" in kvsweep("--cfg", "job", "--resolve", "model=smollm2_135m").out
    settings = ["model=toy_qwen", "model.threads=1", "policy=full", "cache.bits=4", "cache.group=8"]
    settings += ["decoding.max_new_tokens=600"]
    for residual, marked in ((400, True), (4, False)):
        overrides = (f"cache.scheme={scheme}", f"cache.residual={residual}", f"results_dir={tmp_path}/{residual}")
        ended = kvsweep(*settings, *overrides, "benchmark.limit=1")
        assert ended.code == 0, ended.err
        run = load_run(tmp_path / str(residual) / "default")
        assert (run.completions["peak_length"].max() < residual + 1) == marked
        assert list(cell_metrics(run)["packed"] == 0) == [marked]
        legend, scores = "§ no row was packed", [line for line in ended.out.splitlines() if "§" in line]
        assert [legend in line for line in scores] == [False] * marked + [True]


def test_the_estimate_counts_the_bytes_of_packed_rows(kvsweep, tmp_path):
    shape = ModelSpec.of(
        read_architecture(ModelConfig(name="toy_qwen", title="", path=str(WEIGHTS / "toy_qwen")))
    ).cache_shape("float32")
    ended = kvsweep(
        "--dry-run", "cache.bits=2", "policy.budget=4000", "decoding.max_new_tokens=9000", f"results_dir={tmp_path}"
    )
    bytes_ = SlotCache.bytes_per_slot(shape, 4001, CacheConfig(bits=2, residual=16))
    assert f"{bytes_ / 2**20:.1f} MiB a slot of 4001 tokens" in ended.out
    assert "3 layers x 2 heads x 24 bytes a token, and 16 rows of 2 x 32 x 4 a slot" in ended.out
    fp8 = ["cache.scheme=fp8", "cache.scale=token", "policy.budget=4000", "decoding.max_new_tokens=9000"]
    said = kvsweep("--dry-run", *fp8, f"results_dir={tmp_path}").out
    bytes_ = SlotCache.bytes_per_slot(shape, 4001, CacheConfig(scheme="fp8", scale="token"))
    assert f"{bytes_ / 2**20:.1f} MiB a slot of 4001 tokens" in said
    assert "3 layers x 2 heads x 72 bytes a token, a question" in said
