"""Bytes per setting, the cheapest that holds, and how a packed full cache is told apart from the full cache."""

import json
from unittest.mock import Mock

import pytest
import yaml

from kvsweep.analysis.load import load_run
from kvsweep.analysis.numbers.cheapest import cheapest_in_words, settings_by_bytes
from kvsweep.analysis.numbers.kv_bytes import size
from kvsweep.analysis.numbers.metrics import cell_metrics
from kvsweep.analysis.pictures.cost import _shape, cost_figure
from kvsweep.analysis.pictures.tradeoffs import bytes_figure
from kvsweep.harness.toy.paths import WEIGHTS

# Bytes of a row and of the newest rows, by bits.
SIZES = {16: (1536, 0), 8: (864, 24576), 4: (480, 24576)}


@pytest.fixture
def metrics(make_cell, tmp_path):
    """Full cache and dynts at three widths; 4 bits lose every second answer."""
    right = [[1, 1]] * 40
    for bits, policy in ((b, p) for b in SIZES for p in ("full", "dynts")):
        wrong = [[1, 0]] * 40 if bits == 4 else right
        folder = make_cell(wrong, policy=policy, seed=bits)  # the seed gives the folder a name of its own
        cell = yaml.safe_load((folder / "cell.yaml").read_text()) | {"condition": "same", "seed": 0}
        if bits != 16:
            cell["cache"] = {"bits": bits, "group": 32, "residual": 16}
        (folder / "cell.yaml").write_text(yaml.safe_dump(cell))
        path = folder / "provenance.json"
        sizes = dict(zip(("row", "newest"), SIZES[bits], strict=True)) | {"fixed": 0, "weights": 5 * 2**19}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bytes": sizes}))
    return cell_metrics(load_run(tmp_path / "run"))


def test_bytes_and_the_cheapest_that_holds(metrics):
    names = metrics.set_index(["policy", "bits"])
    assert set(names.index) == {(p, b) for b, p in ((b, p) for b in (8, 4) for p in ("full_packed", "dynts"))} | {
        ("full", 16),
        ("dynts", 16),
    }
    assert names.loc[("dynts", 4), "variant"] == "bits=4"
    assert names.loc[("full", 16), "variant"] == ""
    # A text of 201 tokens after 40: lengths 40 .. 240 with all rows, 129 at the peak with eviction.
    assert names.loc[("full", 16), "kv_bytes_mean"] == 1536 * 140
    assert names.loc[("full_packed", 8), "kv_bytes_mean"] == 864 * 140 + 24576
    assert names.loc[("dynts", 4), "kv_bytes_peak"] == 480 * 129 + 24576
    # The memory of packed rows is less at equal lengths.
    assert names.loc[("full_packed", 8), "kept_memory"] == pytest.approx((864 * 240 + 24576) / (1536 * 240))
    assert names.loc[("dynts", 16), "kept_memory"] == pytest.approx(129 / 240)
    assert names.loc[("full_packed", 8), "kept_rows"] == 1
    # Every cell is compared with the full cache of 16 bits, a packed full cache too.
    assert names["diff_to_full"].drop(("full", 16)).notna().all()
    assert names.loc[("full_packed", 4), "diff_to_full"] == -0.5
    settings = settings_by_bytes(metrics, "toy_qwen")
    assert list(settings["bits"][settings["holds"]].drop_duplicates()) == [8, 16]
    said = cheapest_in_words(settings)
    assert "DynTS 0.3 / 48, budget 128, bits=8" in said
    assert "2.5 MiB of weights" in said
    at_a_cost = metrics.assign(decision=metrics["decision"].replace("holds", "costs"))
    assert cheapest_in_words(settings_by_bytes(at_a_cost, "toy_qwen")) == said
    assert cheapest_in_words(settings[settings["bits"] == 4]) == "By bytes, no setting is shown to hold."


def test_the_picture_has_a_curve_for_each_width(metrics):
    figure = bytes_figure(metrics, "toy_qwen")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"DynTS, 16 bits", "DynTS, 8 bits", "DynTS, 4 bits", "all rows, 8 bits", "Pareto front"} <= set(labels)
    assert bytes_figure(metrics[metrics["bits"] == 16], "toy_qwen") is None


def test_the_cost_of_packed_rows_is_drawn_in_bytes(metrics, tmp_path):
    figure = cost_figure(load_run(tmp_path / "run"), metrics, "toy_qwen")
    # The first step attends over 40 rows, nothing evicted.
    first = [float(line.get_ydata()[0]) for line in figure.axes[1].lines]
    assert first == pytest.approx([1536 * 40 / (row * 40 + newest) for row, newest in (SIZES[4], SIZES[8], SIZES[16])])


def test_layers_with_windows_do_not_attend_to_the_cache():
    """Of two models of four query heads of 32, one has two layers with windows of 32 rows among four."""
    model = {name: {"config": {"model": {"path": str(WEIGHTS / name)}}} for name in ("toy_qwen", "toy_qwen_windows")}
    run = Mock(provenance=model)
    row = 4 * 4 * 32
    plain, windows = _shape(run, "toy_qwen"), _shape(run, "toy_qwen_windows")
    assert plain[1] == 3 * row
    assert windows[1] == 2 * row
    per_layer = (plain[0] - 2 * 128 * 128) / 3
    assert windows[0] == 4 * per_layer + 2 * 128 * 128 + 2 * 32 * row


def test_schemes_and_bits_of_keys_and_values_are_told_apart(make_cell, tmp_path):
    """Also where a run has only the default scheme and one other, or one uneven pair of bits."""
    stored = [{"bits": 4}, {"bits": 4, "scheme": "kivi"}, {"key_bits": 4, "value_bits": 2}]
    for seed, cache in enumerate(stored):
        folder = make_cell([[1]], policy="dynts", seed=seed)
        cell = yaml.safe_load((folder / "cell.yaml").read_text()) | {"condition": "same", "seed": 0}
        (folder / "cell.yaml").write_text(yaml.safe_dump({**cell, "cache": {**cache, "group": 32, "residual": 16}}))
    cells = load_run(tmp_path / "run").cells.set_index("variant")
    names = ["bits=4, scheme=rotated", "bits=4, scheme=kivi", "bits=4/2, scheme=rotated"]
    assert sorted(cells.index) == sorted(names)
    assert list(cells.loc[names, "bits"]) == [4, 4, 3]
    assert list(cells.loc[names, "unpacked_rows"]) == [16, 47, 16]


def test_bits_are_named_where_all_cells_but_the_full_cache_have_them(make_cell, tmp_path):
    make_cell([[1]])
    for policy in ("full", "dynts"):
        folder = make_cell([[1]], policy=policy, seed=1)
        cell = yaml.safe_load((folder / "cell.yaml").read_text()) | {"condition": "same", "seed": 0}
        cache = {"bits": 2, "group": 32, "residual": 16}
        (folder / "cell.yaml").write_text(yaml.safe_dump({**cell, "cache": cache}))
    cells = load_run(tmp_path / "run").cells
    assert dict(zip(cells["policy"], cells["variant"], strict=True)) == {
        "full": "",
        "full_packed": "bits=2",
        "dynts": "bits=2",
    }


def test_sizes_in_words():
    assert [size(n) for n in (12, 2048, 5.5 * 2**20, 2**30)] == ["12 bytes", "2.0 KiB", "5.5 MiB", "1.0 GiB"]
    assert size(float("nan")) == "–"
