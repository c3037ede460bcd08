"""The Hugging Face hub: whether it answers, what its local cache holds, and the message for an unreadable model."""

import json
import re
import ssl
import sys
import urllib.request
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

from kvsweep.messages.errors import UserError

Loaded = TypeVar("Loaded")
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_COMMIT = re.compile("[0-9a-f]{40}")
_NAME = "name a folder with config.json and safetensors, or an id on the hub"


@cache
def is_reachable() -> bool:
    """True if the hub answers. If not, its libraries use their caches from now on, without retries.

    The hub is asked once per process. Any answer counts, also one with an unknown certificate.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=5.0).close()
        except HTTPError:  # an answer, such as "not allowed"
            pass
        except OSError as error:
            is_certificate = isinstance(getattr(error, "reason", error), ssl.SSLError)  # URLError names its cause
            constants.HF_HUB_OFFLINE = not is_certificate
        except (HTTPException, ValueError):  # the server does not speak HTTP, or the address is none
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def is_id(place: str) -> bool:
    """True if a path has the form of a hub id."""
    return _ID.fullmatch(place) is not None


@cache
def commit_of(place: str, revision: str | None) -> str:
    """Return the commit that a branch, a tag or None (main) of a hub model names; a commit names itself.

    The hub is asked once per process, or its local cache if the hub does not answer; a note goes to stderr. Raises
    UserError for a name that neither knows, because a branch moves and identifies no model.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import hf_hub_download

    name = revision or "main"
    try:
        file = hf_hub_download(place, "config.json", revision=name, local_files_only=not is_reachable())
    except Exception as error:  # the hub's library may raise anything
        raise UserError(f"model.path={place}: {reason(place, revision, error)}.") from error
    commit = Path(file).parent.name  # the cache has a folder for each commit
    print(f"note: {place} is taken at commit {commit}, which {name} names now.", file=sys.stderr)
    return commit


def from_place(load: Callable[..., Loaded], place: str, commit: str | None, **options: Any) -> Loaded:
    """Return what `load` reads from a folder, from the cache if it has the commit, or from the hub.

    `load` is a `from_pretrained`, and `options` are its other arguments.
    """
    if not Path(place).is_dir():
        if not is_id(place):
            raise UserError(
                f"model.path={place} is no folder, and no id on the hub such as "
                "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B: name the one or the other."
            )
        from huggingface_hub import try_to_load_from_cache

        # The cache knows the last file that loading a model asks for, even if the hub does not have it.
        is_cached = try_to_load_from_cache(place, "generation_config.json", revision=commit) is not None
        options["local_files_only"] = is_cached or not is_reachable()
    return load(place, revision=commit, **options)


def json_of(place: str, revision: str | None, name: str) -> dict[str, Any]:
    """Return the fields of a file of a folder or of the hub's local cache; {} without the file or without fields."""
    file = Path(place) / name
    if not Path(place).is_dir() and is_id(place):
        from huggingface_hub import try_to_load_from_cache

        cached: Any = try_to_load_from_cache(place, name, revision=revision)
        # None: the cache does not know; another object: the cache knows that the hub does not have the file.
        file = Path(cached) if isinstance(cached, str) else file
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is no JSON ({error}): take the model's own file (in a clone: `git lfs pull`)."
        ) from error
    return fields if isinstance(fields, dict) else {}


def check_tensors(missing: Collection[str], surplus: Collection[str] = ()) -> None:
    """Raise ValueError if a checkpoint's tensors differ from the model's: transformers would draw or drop them."""
    for names, what in ((missing, "lacks tensors of"), (surplus, "has tensors that are not of")):
        if names:
            raise ValueError(f"the checkpoint {what} the model, {len(names)} with {min(names)}")


def first_line(error: BaseException) -> str:
    """Return the start of an error's message for another sentence: its first line without a full stop.

    After a colon the second line is its end: errors of a config's fields have the reason there. It is the error's type
    if there is no message.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    start = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return " ".join(start.split()).rstrip(".:")[:200]


def reason(place: str, revision: str | None, error: BaseException) -> str:
    """Return why a model or data set at `place` could not be read, and what to do."""
    cause: BaseException | None = error
    names = set[str]()  # of the classes of the error and its causes
    while cause is not None:
        names.update(kind.__name__ for kind in type(cause).__mro__)
        cause = cause.__cause__ or cause.__context__
    if not Path(place).is_dir():
        if "GatedRepoError" in names:
            return "it is gated: accept its terms on its hub page and run `hf auth login`"
        if "RevisionNotFoundError" in names:
            return f"it has no revision {revision}: name a commit of its hub page as model.revision"
        if "RepositoryNotFoundError" in names:
            return "it is not on the hub or not open to you: check the name, or run `hf auth login` if it is private"
        if isinstance(error, OSError) and not is_reachable():
            hint = "check the network, or the path, since no such folder is here"
            return f"the hub cannot be reached, and its cache on this disk lacks it: {hint}"
    hint = "correct its files, or name another" if (Path(place) / "config.json").is_file() else _NAME
    return f"{first_line(error)}: {hint}"


def is_lfs_pointer(file: Path) -> bool:
    """True if a file is only Git LFS's pointer, left by a clone without Git LFS."""
    start = b"version https://git-lfs.github.com/spec/"
    if not file.is_file():  # reading a pipe might never end
        return False
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(start)) == start
    return False


def lack_of(folder: Path, *, safetensors_only: bool) -> str | None:
    """Return what a folder that could not be loaded is or is missing, and what to do; None if nothing is found."""
    files = sorted(folder.glob("*"))  # none of what is no folder, or not readable
    for file in files:
        if is_lfs_pointer(file):
            return f"its {file.name} is a Git LFS pointer in place of the file: run `git lfs pull` in the clone"
    names = {file.name for file in files}
    if "config.json" in names:
        if "tokenizer.json" not in names:
            return "it has no tokenizer.json: add the file, which the tokenizer's save_pretrained writes"
        has_safetensors = any(file.suffix == ".safetensors" for file in files)
        if not safetensors_only or has_safetensors:  # nothing is missing: the fault is within a file
            return None
        if any(file.match("pytorch_model*.bin") for file in files):
            return "it has its weights as .bin alone: set model.safetensors_only=false, or convert them to safetensors"
        return f"it has no weights: {_NAME}"
    if "adapter_config.json" in names:
        return "it is a LoRA adapter: name it as model.adapter, and the model that it was trained on as model.path"
    commits = sorted(snapshot.name for snapshot in folder.glob("snapshots/*"))
    if commits:
        return f"it is a model's folder in the hub's cache: name its snapshot of a commit, snapshots/{commits[0]}"
    return None


def adapter_files(folder: str) -> list[Path]:
    """Return the two files of a LoRA adapter, as peft saves them; raises UserError if they are missing."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = [Path(folder) / name for name in names]
    if not all(file.is_file() for file in files):
        raise UserError(f"model.adapter={folder} holds no adapter: name a folder with {' and '.join(names)}, or null.")
    return files
