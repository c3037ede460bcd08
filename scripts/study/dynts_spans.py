"""Two spans that can be the answer in texts without a closing tag, and the choice among heads for both.

    python scripts/study/dynts_spans.py paragraph GGUF BOX OUT
    python scripts/study/dynts_spans.py choose FOLDER

`paragraph` copies the traces of `kvsweep predictor traces` from the folder BOX, whose answer begins behind the box's
mark, into the folder OUT, where it is the whole last paragraph that holds the box. A trace without a paragraph before
is not kept. `choose` reads the eval.json of the heads in FOLDER/SPAN/TARGET, prints each, and writes
FOLDER/choice.json; a choice that stands there stays.
"""

import argparse
import json
import shutil
from pathlib import Path

from msgspec.structs import replace
from transformers import AutoTokenizer

from kvsweep.harness.gguf.conversion import converted
from kvsweep.harness.predictor.traces import ORIGIN_FILE, QUESTIONS_FILE, TRACES_FILE, Trace
from kvsweep.run_files.row_types import append_row, read_rows

# In the order of preference where two heads rank alike.
HEADS = [(span, target) for span in ("box", "paragraph") for target in ("power", "linear")]
ALIKE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    paragraph = commands.add_parser("paragraph")
    for name in ("gguf", "box", "out"):
        paragraph.add_argument(name, type=Path)
    commands.add_parser("choose").add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "paragraph":
        write_paragraphs(options.gguf, options.box, options.out)
    else:
        choose(options.folder)


def write_paragraphs(gguf: Path, box: Path, out: Path) -> None:
    if (out / TRACES_FILE).exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(converted(gguf))
    out.mkdir(parents=True, exist_ok=True)
    for name in (ORIGIN_FILE, QUESTIONS_FILE):
        shutil.copy(box / name, out / name)
    kept = without = 0
    for trace in read_rows(box / TRACES_FILE, Trace):
        if not trace.kept:
            continue
        thinking = range(trace.think_start, trace.think_end)
        breaks = [at for at in thinking if "\n\n" in tokenizer.decode([trace.token_ids[at]])]
        if not breaks or breaks[-1] - trace.think_start < 2:
            without += 1
            continue
        append_row(out / TRACES_FILE, replace(trace, think_end=breaks[-1], tag_tokens=1))
        kept += 1
    print(f"{kept} traces with a last paragraph, {without} without")


def choose(folder: Path) -> None:
    """Take the head that finds most of the true top 20% of held-out tokens in its own top 20%."""
    shares = {}
    for span, target in HEADS:
        measured = json.loads((folder / span / target / "answer" / "eval.json").read_text())
        share = measured["true_top_20_percent_found_in_predicted_top"]["20%"]
        shares[f"{span}/{target}"] = share
        texts = measured["held_out_traces"]
        print(
            f"{span}/{target}: {share:.3f} of the true top 20%, rank {measured['rank_correlation']:.3f}, {texts} texts"
        )
    largest = max(shares.values())
    first = next(name for name, share in shares.items() if share >= largest - ALIKE)
    choice = folder / "choice.json"
    if not choice.exists():
        choice.write_text(json.dumps({"head": first, "shares": shares}, indent=2) + "\n")
    print(f"chosen: {json.loads(choice.read_text())['head']}")


if __name__ == "__main__":
    main()
