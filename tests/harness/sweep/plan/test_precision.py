"""The keys cache.bits, cache.group and cache.residual: identity, refusals, the estimate, a run in shards."""

import json

import pytest
import yaml

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import CacheConfig
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.spec import ModelSpec, read_architecture
from kvsweep.harness.toy.paths import WEIGHTS

DECIDED = "until=decided draws=2 grid.policy=[full,dynts]"
PACKED = ["cache.bits=4", "cache.group=8", "cache.residual=6"]


def completions(folder):
    rows = [json.loads(line) for path in folder.glob("completions*.jsonl") for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["problem_id"], row["draw"]))


def test_packed_cells_have_ids_of_their_own_and_do_not_depend_on_shards(kvsweep, tiny, tiny_policy, tmp_path):
    grid = [*tiny, *tiny_policy, "grid.policy=[full,dynts,random_head]", "draws=2"]
    # At 16 bits the other two settings do nothing, so they name no other cell.
    assert kvsweep(*grid, f"results_dir={tmp_path}/a", "slots=4").code == 0
    assert "(3 done)" in kvsweep(*grid, *PACKED[1:], f"results_dir={tmp_path}/a", "--dry-run").out
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
        stats = json.loads((folder / "stats.jsonl").read_text().splitlines()[0])
        assert stats["kv_bytes_allocated"] == stats["kv_bytes_analytic"]
        sizes = json.loads((folder / "provenance.json").read_text())["bytes"]
        # Two layers of two heads: keys and values of 4 + 4 bytes, and 6 rows of 8 numbers in float32.
        assert (sizes["row"], sizes["newest"]) == (2 * 2 * 2 * 8, 2 * 2 * 2 * 6 * 32)
    evicted = [folder for folder in packed if any(row["evictions"] for row in completions(folder))]
    assert len(evicted) == 2
    texts = [[row["token_ids"] for row in completions(folder)] for folder, cell in cells.items() if "full" in str(cell)]
    assert texts[0] != texts[1], "the bits act"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cache.bits=3", "cache.bits=3 is unknown: choose one of 16, 8, 4, 2."),
        ("cache.residual=0", "cache.residual=0 is out of range: it is a number of tokens, at least 1."),
        ("cache.group=5", "cache.group=5 does not divide the 32 numbers of a head: choose a divisor."),
        ("cache.size=5", "cache.size"),
        ("cache.residual=230", "cache.residual=230 is out of range: with cache.bits=4 the 257 rows of policy=dynts"),
        (DECIDED, "until=decided compares cells with the full cache of unpacked rows"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(setting, message, kvsweep, tmp_path):
    ended = kvsweep("cache.bits=4", *setting.split(), f"results_dir={tmp_path}")
    assert ended.code == 2
    assert message in ended.err


def test_the_estimate_counts_the_bytes_of_packed_rows(kvsweep, tmp_path):
    shape = ModelSpec.of(
        read_architecture(ModelConfig(name="toy_qwen", title="", path=str(WEIGHTS / "toy_qwen")))
    ).cache_shape("float32")
    ended = kvsweep(
        "--dry-run", "cache.bits=2", "policy.budget=4000", "decoding.max_new_tokens=9000", f"results_dir={tmp_path}"
    )
    bytes_ = SlotCache.bytes_per_slot(shape, 4001, CacheConfig(bits=2, residual=16))
    assert f"{bytes_ / 2**20:.1f} MiB a slot of 4001 tokens" in ended.out
    assert "2 x 3 layers x 2 heads x 12 bytes a token, and 16 rows of 32 x 4 a slot" in ended.out
