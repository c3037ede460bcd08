"""Texts from outside: no command prints their control characters, runs them, or takes them for something else.

A text that breaks a command becomes a line of attack_corpus.jsonl.
"""

import csv
import json
import random
import re
import shutil
import sys
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from kvsweep.run_files.row_types import COMPLETIONS_FILE
from tests.attack.field import MARK, RAW, ROOT, TRACEBACK, Field, compared, readers, rows

# The hostile rows: each has a `name`, and a `text` for any place of a text or a `line` for any file of lines.
CORPUS = [json.loads(line) for line in Path(__file__).with_name("attack_corpus.jsonl").read_text().splitlines()]
pytestmark = pytest.mark.slow


@pytest.mark.drawn("entry", CORPUS, 22)
def test_hostile_rows(entry, field):
    """A text stands in problems, rows, titles and statuses, and every command works on them."""
    results, raw = field.copy("hostile"), "line" in entry
    text = entry.get("text", entry.get("line", "")) * entry.get("times", 1)
    text = text.replace("MARK", str(field.scratch / MARK))
    sweep_problems(field, results, _hostile_problems(field, text, raw=raw))
    _plant(results / "default", text, raw=raw)
    plan = readers(results, field.scratch / "traced")
    cell = next(path.parent for path in sorted((results / "default").glob("*/DONE")))
    stolen = field.scratch / "stolen"
    plan["predictor"] = (["traces", "recipe=toy", f"recipe.out={stolen}", f"recipe.import_from={cell}"], cell, ())
    for reader, (arguments, _, _) in plan.items():
        field.run(f"kvsweep {reader}", *arguments, codes=(0, 1, 2))
    left = {cell_id: lines - (lines - rows(field.calm)[cell_id]) for cell_id, lines in rows(results).items()}
    field.tally.add(compared(rows(field.calm), left))
    field.tally.code_run += _ran(field.scratch, results)
    field.tally.tried += 1
    assert field.tally.is_clean, field.tally


def sweep_problems(field: Field, results: Path, problems: Path):
    """Let a sweep read the problems, with its own prompt and with the problems as the prompt."""
    small = ["benchmark.limit=2", "decoding.max_new_tokens=16", "grid.policy=[full,dynts]", "run_name=own"]
    own = field.sweep(results, f"benchmark.path={problems}", "benchmark.source=file", *small)
    for words in (own, [*own, f"benchmark.prompt={problems}"]):
        field.run("kvsweep", *words)


def _hostile_problems(field: Field, text: str, *, raw: bool) -> Path:
    path = field.scratch / "hostile.jsonl"
    if raw:
        path.write_bytes(text.encode("utf-8", "surrogatepass") + b'\n{"id": 1, "problem": "1+1?", "answer": 2}\n')
    else:
        lines = [{"id": text, "problem": f"What is {text}?", "answer": 7}, {"id": "b", "problem": text, "answer": 8}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _plant(run_folder: Path, text: str, *, raw: bool):
    """Put the text into every file of a run's cells, beside the rows that are there."""
    for number, cell in enumerate(sorted(path.parent for path in run_folder.glob("*/DONE"))):
        if raw:
            for name in (COMPLETIONS_FILE, "grades.jsonl", "stats.jsonl", "provenance.json", "cell.yaml", "DONE"):
                if number == 0 or name.endswith(".jsonl"):
                    with (cell / name).open("ab") as file:
                        file.write(text.encode("utf-8", "surrogatepass") + b"\n")
            continue
        for name, own in {
            COMPLETIONS_FILE: {"problem_id": text, "text": f"{text}</think>{text} \\boxed{{{text}}}"},
            "grades.jsonl": {"problem_id": text, "answer": text, "gold": "7"},
            "problems.jsonl": {"id": text, "prompt": text, "gold": "7"},
        }.items():
            with (cell / name).open("a+") as file:
                file.seek(0)
                first = json.loads(file.readline())
                first.pop("check")  # as a program that knows no check would write the row
                file.write(json.dumps({**first, **own}) + "\n")
        settings = yaml.safe_load((cell / "cell.yaml").read_text())
        del settings["check"]
        settings["model"]["title"] = settings["benchmark"]["title"] = settings["policy"]["mode"] = text
        settings["model"]["name"] = settings["decoding"]["name"] = text
        with suppress(UnicodeEncodeError):
            (cell / "cell.yaml").write_text(yaml.safe_dump(settings))
        told = json.loads((cell / "provenance.json").read_text())
        told["packages"] = {text: text}
        told["decoding_passes"][0]["command"] = [text]
        (cell / "provenance.json").write_text(json.dumps(told))
    for path in run_folder.glob("status/*.json"):
        status = json.loads(path.read_text())
        status |= {"state": "failed", "error": text, "command": text, "task": text, "host": text}
        for cell_status in status["cells"].values():
            cell_status |= {"model": text, "benchmark": text, "policy": text}
        path.write_bytes((text if raw else json.dumps(status)).encode("utf-8", "surrogatepass"))


class _Page(HTMLParser):
    """Counts what a page would run that kvsweep did not put there."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]):
        names = {name for name, _ in attributes}
        values = [value or "" for name, value in attributes if name in ("src", "href")]
        inert = tag == "script" and ("nonce" in names or ("type", "application/json") in attributes)
        self.runs += tag in {"iframe", "object", "embed", "svg"} or (tag == "script" and not inert)
        self.runs += any(name.startswith("on") for name in names)
        self.runs += any(value.strip().lower().startswith("javascript:") or value == "x" for value in values)


def _ran(scratch: Path, results: Path) -> int:
    """How much of the text from outside has run or would run: as a program, in a page, in a spreadsheet."""
    mark = scratch / MARK
    ran = int(mark.exists())
    mark.unlink(missing_ok=True)
    for path in results.rglob("*.html"):
        page = _Page()
        page.feed(path.read_text())
        ran += page.runs
        if page.runs:
            print(f"{path}: {page.runs}", file=sys.stderr)
    for path in [*results.rglob("*.csv"), *(scratch / "traced").rglob("*.csv")]:
        with path.open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row[:8]]
        ran += any(len(cell) > 1 and cell[0] in "=+-@" and not re.fullmatch(r"[+-][\d.e+-]+", cell) for cell in cells)
    for path in results.rglob("*.md"):
        if found := re.search(r"(?<!\\)<(script|img).*", re.sub(r"`[^`]*`", "", path.read_text())):
            print(f"{path}: {found[0]}", file=sys.stderr)
            ran += 1
    return ran


# --- Inputs that are accepted and mean something else ----------------------------------------------------------

POLICIES = ("full", "dynts", "h2o", "snapkv", "rkv", "window", "streaming_llm", "random", "keydiff", "tova")
NO_GOLDS = (
    '["7"]',
    "b'7'",
    "N/A",
    "None",
    "nan",
    "The answer is 5 because 2+3.",
    "2+3=5\\n#### 5",
    "{'a': 7}",
    "\\ud800",
)
GOLDS = ("7", "\\\\frac{1}{2}", "x^2 + 1", "[2, 3)", "(1, 2)", "5 \\\\text{ cm}", "-4, 9")
Drawn = tuple[list[str], dict[str, str], bool]  # words of the command, files beside it, whether it means what it says


def _renamed(dice: random.Random) -> Drawn:
    policy, name = dice.choice(POLICIES), dice.choice((*POLICIES, "../x", "mine"))
    return [f"policy={policy}", f"policy.name={name}"], {}, policy == name


def _unused(dice: random.Random) -> Drawn:
    names, width = dice.sample(("full", "h2o", "snapkv"), 2), dice.randint(1, 32)
    words = ["policy=snapkv", f"grid.policy=[{','.join(names)}]", f"policy.observation_window={width}"]
    bits = dice.choice((16, 4))
    packed = [f"cache.bits={bits}", f"cache.group={dice.choice((16, 32))}"] if "snapkv" in names else []
    return [*words, *packed], {}, "snapkv" in names and bits == 4 if packed else "snapkv" in names


def _golds(dice: random.Random) -> Drawn:
    is_sound = dice.random() < 0.5
    gold = dice.choice(GOLDS if is_sound else NO_GOLDS)
    lines = [f'{{"id": "a", "problem": "One?", "answer": "{gold}"}}', '{"id": "b", "problem": "Two?", "answer": "8"}']
    dice.shuffle(lines)
    words = ["benchmark=mine", "benchmark.path=drawn.jsonl", "benchmark.answer_kind=expression"]
    return words, {"drawn.jsonl": "\n".join(lines) + "\n"}, is_sound


def _columns(dice: random.Random) -> Drawn:
    kind = dice.choice(("sound", "key", "problem", "keep_if"))
    row = {"id": "a", "problem": "One?", "answer": 7, "kind": "y"}
    lines = [json.dumps(row), json.dumps({**row, "id": "b", "problem": "One?" if kind == "problem" else "Two?"})]
    if kind == "key":
        lines[0] = lines[0].replace('"answer": 7', '"answer": 8, "answer": 7')
    column = "knd" if kind == "keep_if" else "kind"
    words = ["benchmark=mine", "benchmark.path=drawn.jsonl", f"+benchmark.keep_if={{{column}: y}}"]
    return words, {"drawn.jsonl": "\n".join(lines) + "\n"}, kind == "sound"


def _own_policy(dice: random.Random) -> Drawn:
    name, file = dice.choice(("mine2", "h2o", "full")), dice.choice(("mine2", "full"))
    text = (ROOT / "harness/template/conf/policy/spread.yaml").read_text().replace("name: spread", f"name: {name}")
    return ["policy=spread"], {f"conf/policy/{file}.yaml": text}, name == file == "mine2"


@pytest.mark.parametrize("draw", [_renamed, _unused, _golds, _columns, _own_policy])
def test_meaning(
    draw,
    field,
    kvsweep,
    monkeypatch,
    no_own_module,
):
    """Of inputs that mean something else and their sound siblings, the former are refused and the latter are not."""
    place = field.scratch / "own"
    assert kvsweep("init", str(place)).code == 0
    monkeypatch.chdir(place)
    for _ in range(40 if field.long else 4):
        words, files, is_sound = draw(field.dice)
        shutil.rmtree(place / "conf/policy")
        shutil.copytree(ROOT / "harness/template/conf/policy", place / "conf/policy")
        for name, text in files.items():
            (place / name).write_text(text)
        words = ["model=toy_qwen", *words, f"results_dir={field.scratch / 'never'}", "--dry-run"]
        ended = kvsweep(*words)
        said = (ended.out + ended.err).encode("utf-8", "surrogatepass")
        assert ended.code == (0 if is_sound else 2), (words, files, said)
        assert not RAW.search(said), said
        assert not TRACEBACK.search(said), said
        field.tally.tried += 1
