import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvsweep.compression.attention import use_slot_attention

TINY = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


@pytest.mark.parametrize("tokens", [1, 9])
def test_prefill_is_plain_causal_attention(tokens):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2, **TINY)).eval()
    ids = torch.randint(0, 50, (1, tokens))
    expected = model(ids).logits
    use_slot_attention(model)
    torch.testing.assert_close(model(ids, past_key_values=DynamicCache()).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_step_without_its_cache_is_refused():
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, **TINY)).eval()
    use_slot_attention(model)
    cache = DynamicCache()
    model(torch.zeros(1, 5, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ValueError, match="slot_cache"):
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache)
