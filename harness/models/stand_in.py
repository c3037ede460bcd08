"""The stand-in tokenizer of a model that is built with random weights, without a download."""

from collections.abc import Mapping
from string import Template

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvsweep.harness.models.config import ROLES

# As in R1: beginning of text, user, message, assistant, and the opening tag of the thinking.
_CHAT_TEMPLATE = Template(
    "{{ bos_token }}{% for message in messages %}${user}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}${assistant}${think}\n{% endif %}"
)


def stand_in_tokenizer(
    special_tokens: Mapping[str, str], think_start: str | None, think_end: str | None
) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single bytes with the model's special tokens (those of `ROLES`); decoding restores any text.

    The tags around the thinking are tokens too, and the chat template ends with the opening one.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(dict.fromkeys(special_tokens[role] for role in ROLES)))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (think_start, think_end) if tag])
    roles = {role: special_tokens[role] for role in ("user", "assistant")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special_tokens["bos"],
        eos_token=special_tokens["eos"],
        pad_token=special_tokens["eos"],
        chat_template=_CHAT_TEMPLATE.substitute(roles, think=think_start or ""),
        clean_up_tokenization_spaces=False,
    )
