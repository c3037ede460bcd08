"""The slot cache in a decoding loop of your own: `python docs/own_loop.py`.

The text finds that r is 9, this policy drops those tokens, and the end says r is 7: the answer, 5, is wrong. With a
budget of 600 nothing is evicted, and the answer, 7, is right.
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvsweep import ModelSpec, Prefill, Selection, SlotCache, use_slot_attention
from kvsweep.harness.settings import WEIGHTS

path = WEIGHTS / "toy_qwen"  # or a Qwen2, Qwen3 or Llama of yours
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
# AutoTokenizer splits words in Qwen2's way, whatever the file says.
tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
use_slot_attention(model)
chat = [{"role": "user", "content": "Sum p=4+2+3. q=8+4+7. r=8+7+4. s=1+4+2. t=5+9+7. Find t+r+s mod 10."}]
text = tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids
question, budget, window = len(text), 128, 40
cache = SlotCache(ModelSpec.of(model.config).cache_shape("float32"), slots=1, capacity=budget + 1, device=model.device)
cache.admit(Prefill())  # of nothing: the question goes in token by token
for position in range(600):
    cache.begin_step(at := torch.tensor([position]))
    with torch.inference_mode():
        token, keys = torch.tensor([[text[position]]]), {"past_key_values": cache, "slot_cache": cache}
        logits = model(input_ids=token, position_ids=at[:, None], **keys).logits
    if position == len(text) - 1:
        text.append(int(logits.argmax()))
    if text[-1] == tokenizer.eos_token_id:
        break
    if cache.lengths[0] > budget:  # a policy of your own: the question and the newest rows stay
        rows = [*range(question), *range(budget + 1 - window, budget + 1)]
        cache.evict(0, Selection(keep=torch.tensor(rows)))
print(tokenizer.decode(text[question:]), f"{cache.kv_bytes:,} bytes of keys and values, whatever the length")
