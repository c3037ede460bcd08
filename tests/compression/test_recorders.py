import pytest
import torch

from kvsweep.compression.artifacts import read_card
from kvsweep.compression.recorders import ImportancePredictor, load_predictor, save_predictor


def test_forward_is_a_bias_free_softplus_perceptron():
    torch.manual_seed(0)
    predictor = ImportancePredictor(6, (5, 3)).double()
    hidden = torch.randn(2, 7, 6, dtype=torch.float64)
    expected = hidden
    for layer in predictor.layers:
        assert layer.bias is None
        expected = torch.log1p(torch.exp(expected @ layer.weight.T))
    torch.testing.assert_close(predictor(hidden), expected[..., 0])
    assert predictor(hidden).shape == (2, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_gives_the_same_scores(tmp_path, dtype):
    predictor = ImportancePredictor(6, (5,)).to(dtype)
    save_predictor(predictor, tmp_path / "p", {"label": "far_max"})
    loaded = load_predictor(tmp_path / "p")
    hidden = torch.randn(4, 6)
    torch.testing.assert_close(loaded(hidden), predictor.float()(hidden))
    assert read_card("predictor", tmp_path / "p") == {
        "kind": "predictor",
        "hidden_size": 6,
        "widths": [5],
        "label": "far_max",
    }
    assert not any(p.requires_grad for p in loaded.parameters())
