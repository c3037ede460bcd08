"""What libraries warn of while a model is loaded, as notes on stderr."""

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler

_HARMLESS = re.compile(
    # `check_tensors`, `probe.merge`, `_check_ends` and `unapplied_settings` look at these themselves.
    "LOAD REPORT|Found missing adapter keys|`tie_word_embeddings=True`|save_embedding_layers"
    "|_token_id must be `None`|generation flags"
    # These change no number.
    "|is deprecated|falling back to|Ignoring clean_up_tokenization_spaces|to be used together with"
)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print what transformers and Python warn of inside the block, each text once, except what is harmless."""
    from transformers.utils import logging as library

    library.warning_once.cache_clear()  # another model may have had the same warning
    # transformers' own handlers would print each warning as it comes.
    logger = logging.getLogger("transformers")
    collector = BufferingHandler(sys.maxsize)
    handlers, level = logger.handlers, logger.level
    logger.handlers = [collector]
    logger.level = logging.WARNING
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.handlers, logger.level = handlers, level
        texts = [record.getMessage() for record in collector.buffer]
        texts += [str(warning.message) for warning in caught]
        for text in dict.fromkeys(texts):
            if not _HARMLESS.search(text):
                line = " ".join(text.split())
                print(f"note: a library warns of this model: {line:.500}", file=sys.stderr)
