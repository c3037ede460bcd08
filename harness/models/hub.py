"""The hub: whether it answers, what lies in its cache on this disk, and the sentence where a model cannot be had."""

import re
import ssl
import sys
import urllib.request
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

from kvsweep.base.errors import UserError

Loaded = TypeVar("Loaded")
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@cache
def is_reachable() -> bool:
    """True if the hub answers. Where it does not, its libraries answer from their caches from now on, without retries.

    It is asked once a process. An answer of any kind counts, and so does one whose certificate is not known here.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5.0).close()
        except HTTPError:
            pass
        except OSError as error:
            constants.HF_HUB_OFFLINE = not isinstance(getattr(error, "reason", error), ssl.SSLError)
    if constants.HF_HUB_OFFLINE and "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def from_place(load: Callable[..., Loaded], place: str, revision: str | None) -> Loaded:
    """What `load`, a `from_pretrained`, reads from a folder, from the hub's cache if a commit pins it, or the hub."""
    if Path(place).is_dir():
        return load()
    if not _ID.fullmatch(place):
        neither = "is no folder, and no id on the hub such as deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
        raise UserError(f"model.path={place} {neither}: name the one or the other.")
    from huggingface_hub import try_to_load_from_cache

    # The cache knows of the last file that loading a model asks for, even if the hub has no such file.
    is_pinned = revision is not None and re.fullmatch("[0-9a-f]{40}", revision) is not None
    known = try_to_load_from_cache(place, "generation_config.json", revision=revision) if is_pinned else None
    return load(local_files_only=True) if known is not None or not is_reachable() else load()


def cached_file(place: str, revision: str | None, name: str) -> Path | None:
    """A file of a folder, or of the hub's cache on this disk; None where there is none."""
    if Path(place).is_dir() or not _ID.fullmatch(place):
        return Path(place) / name
    from huggingface_hub import try_to_load_from_cache

    found: Any = try_to_load_from_cache(place, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def check_tensors(missing: Collection[str], surplus: Collection[str] = ()) -> None:
    """Raise a ValueError where a checkpoint has other tensors than the model: transformers draws or drops them."""
    for names, what in ((missing, "lacks tensors of"), (surplus, "has tensors that are not of")):
        if names:
            raise ValueError(f"the checkpoint {what} the model, {len(names)} with {min(names)}")


def lines_of(error: BaseException) -> list[str]:
    """The lines that an error says, or its kind where it says nothing."""
    return str(error).strip().splitlines() or [type(error).__name__]


def reason(place: str, revision: str | None, error: BaseException) -> str:
    """Why a model or a data set at `place` could not be read, and the way out."""
    chain, names = error, set[str]()
    while chain is not None:
        names |= {kind.__name__ for kind in type(chain).__mro__}
        chain = chain.__cause__ or chain.__context__  # type: ignore[assignment]
    if not Path(place).is_dir():
        if "GatedRepoError" in names:
            return "it is gated: accept its terms on its hub page and run `hf auth login`"
        if "RevisionNotFoundError" in names:
            return f"it has no revision {revision}: name a commit of its hub page as model.revision"
        if "RepositoryNotFoundError" in names:
            return "it is not on the hub or not open to you: check the name, or run `hf auth login` if it is private"
        if isinstance(error, OSError) and not is_reachable():
            return "the hub cannot be reached, and its cache on this disk lacks it: check the network"
    return f"{lines_of(error)[0].rstrip('.')}: name a folder with config.json and safetensors, or an id on the hub"
