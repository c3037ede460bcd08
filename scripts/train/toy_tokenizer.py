"""The toy models' tokenizer: a word-level vocabulary that takes any text and decodes the tasks' texts unchanged."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 1024
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
THINK_TOKENS = ("<think>", "</think>")

# The last alternative takes any one character, so every text splits into pieces; an unknown piece becomes <unk>.
_PIECE = r"\\boxed\{| ?[A-Za-z]{2,} ?|[A-Za-z]|[0-9]|[.,;:?] ?|\n|[^A-Za-z0-9]"
# A word carries the spaces beside it, so that joined pieces give the text back.
_WORDS = (
    *(" is ", " mod ", " ok", "Add ", "Check ", "Done", "Find ", "Fine", "Good", "Hmm", "Let ", "Now ", "Ok"),
    *("Set ", "So ", "Sum ", "That ", "Wait", "Yes", "again", "all", "all ", "by ", "carry", "carry "),
    *("done", "go ", "is ", "it ", "let ", "looks ", "me ", "next ", "on", "one", "redo", "right"),
    *("see", "see ", "start", "step", "step ", "think", "wait", "with "),
)
_MARKS = (*"0123456789+=", "\\boxed{", "}", ".", ". ", ",", ", ", ":", ": ", "?", "? ", " ", "\n")
_LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")

# Like R1's template: the prompt opens the thinking, and the thinking of earlier turns is dropped.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<assistant>{{ message['content'].split('</think>')[-1] }}{{ eos_token }}"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of both toy models.

    `<think>` and `</think>` are ordinary added tokens, so decoding keeps them even where it skips special tokens.
    Load a saved tokenizer with `PreTrainedTokenizerFast`, because `AutoTokenizer` gives every Qwen2 model Qwen2's own
    pre-tokenizer.
    """
    pieces = (*SPECIAL_TOKENS, *THINK_TOKENS, *_MARKS, *_LETTERS, *_WORDS)
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
