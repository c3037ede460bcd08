"""`kvsweep judge`: real files of other programs, hostile files, verdicts on outputs whose truth is known."""

import csv
import io
import json
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvsweep.analysis.outputs import read_outputs
from kvsweep.cli import main
from kvsweep.errors import UserError

# Written by these programs at these versions, on two questions: inspect_ai with its mock model, two epochs, and
# lm-evaluation-harness with its dummy model.
REAL = Path(__file__).parent / "judged"


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["judge", *map(str, words)])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def rows(problems: int, draws: int, lost: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Outputs that are right but for the first `lost` problems, all of whose draws are wrong."""
    pairs = [(problem, draw) for problem in range(problems) for draw in range(draws)]
    return [{"id": f"p{p}", "draw": d, "correct": p >= lost, "gold": "7", **more} for p, d in pairs]


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_the_logs_of_inspect_ai(judge: Callable[..., tuple[int, str, str]]) -> None:
    full, fp8 = (REAL / f"inspect_ai_0.3.285_{name}.json" for name in ("full", "fp8"))
    answers = read_outputs(fp8)
    assert [
        (one.problem, one.draw, one.correct) for one in sorted(answers, key=lambda one: (one.problem, one.draw))
    ] == [
        ("p1", 1, 0.0),
        ("p1", 2, 0.0),
        ("p2", 1, 1.0),
        ("p2", 2, 1.0),
    ]
    code, out, _ = judge(full, fp8, "--name", "full", "--name", "fp8")
    assert code == 4
    assert "fp8 unclear  -50.0" in out


def test_the_zipped_logs_of_inspect_ai(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inspect log convert"):
        read_outputs(REAL / "inspect_ai_0.3.285.eval")
    samples = json.loads((REAL / "inspect_ai_0.3.285_fp8.json").read_text())["samples"]
    with zipfile.ZipFile(tmp_path / "log.eval", "w", zipfile.ZIP_DEFLATED) as log:
        log.writestr("header.json", "{}")
        for sample in samples:
            log.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    assert read_outputs(tmp_path / "log.eval") == read_outputs(REAL / "inspect_ai_0.3.285_fp8.json")


def test_the_samples_of_lm_evaluation_harness(tmp_path: Path) -> None:
    answers = read_outputs(REAL / "lm_eval_0.4.13.jsonl")
    assert [(one.problem, one.draw, one.correct, one.gold) for one in answers] == [
        ("0", 0, 0.0, '"7"'),
        ("1", 0, 1.0, '"lol"'),
    ]
    # A task with two filters writes each problem twice.
    lines = [json.loads(line) for line in (REAL / "lm_eval_0.4.13.jsonl").read_text().splitlines()]
    both = write(
        tmp_path / "both.jsonl", [line | {"filter": name} for name in ("strict", "flexible") for line in lines]
    )
    with pytest.raises(UserError, match="--where KEY=VALUE"):
        read_outputs(both)
    assert read_outputs(both, where={"filter": "strict"}) == answers


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "bom", "crlf"])
def test_the_same_rows_in_every_form(kind: str, tmp_path: Path) -> None:
    items, path = rows(3, 2, 1), tmp_path / "a.txt"
    text = io.StringIO()
    table = csv.DictWriter(text, list(items[0]))
    table.writeheader()
    table.writerows(items)
    lines = "".join(json.dumps(item) + "\n" for item in items)
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(items), path)
    else:
        data = {
            "jsonl": lines,
            "json": json.dumps(items, indent=1),
            "csv": text.getvalue(),
            "crlf": lines.replace("\n", "\r\n"),
        }
        path.write_bytes(b"\xef\xbb\xbf" * (kind == "bom") + data.get(kind, lines).encode())
    found = [(one.problem, one.draw, one.correct) for one in read_outputs(path)]
    assert found == [("p0", 0, 0), ("p0", 1, 0), ("p1", 0, 1), ("p1", 1, 1), ("p2", 0, 1), ("p2", 1, 1)]


def test_thirty_problems_asked_once_and_eight_times(judge: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for draws, expected in ((1, {"same": "unclear", "five": "unclear"}), (8, {"same": "safe", "five": "worse"})):
        files = {
            name: write(tmp_path / f"{name}.jsonl", rows(30, draws, lost))
            for name, lost in (("full", 0), ("same", 0), ("five", 2))
        }
        code, out, _ = judge(*files.values(), "--bytes", "same=0.5", "--markdown", tmp_path / "m.md")
        labels = {
            line.split()[0]: line.split()[1]
            for line in out.splitlines()
            if line.split()[:1] and line.split()[0] in files
        }
        assert labels == expected
        assert code == (4 if draws == 1 else 1)
        assert "draws to decide" in out
        page = (tmp_path / "m.md").read_text()
        assert page.startswith("| setting | label | points |")
        assert "| same | " in page
        assert judge(files["full"], files["same"])[0] == (4 if draws == 1 else 0)


@pytest.mark.parametrize(("margin", "problems"), [(5, 74), (10, 37)])
def test_the_margin_is_in_points(
    judge: Callable[..., tuple[int, str, str]], tmp_path: Path, margin: int, problems: int
) -> None:
    # Where no pair differs, a loss of a part m of n problems has the chance exp(-m n): 2.5% at n = ln(40) / m.
    assert problems - 1 < math.log(40) / (margin / 100) < problems
    for number, code in ((problems - 1, 4), (problems, 0)):
        files = [write(tmp_path / f"{name}.jsonl", rows(number, 1)) for name in ("full", "same")]
        assert judge(*files, "--margin", margin)[0] == code


def test_one_of_many_that_is_safe_may_be_so_by_luck(judge: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    full = write(tmp_path / "full.jsonl", rows(90, 1))
    alike = [write(tmp_path / f"s{number}.jsonl", rows(90, 1)) for number in range(5)]
    assert "s0  safe" in judge(full, alike[0])[1]
    code, out, _ = judge(full, *alike)
    assert code == 4
    assert out.count("may be safe") == 5
    # From the largest cache down each has the whole level, until the first that is not safe.
    sizes = [word for number in range(5) for word in ("--bytes", f"s{number}=0.{9 - number}")]
    assert judge(full, *alike, *sizes)[0] == 0


def test_what_does_not_pair_is_named(judge: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    full = write(tmp_path / "full.jsonl", rows(30, 8))
    other = rows(31, 8, stop_reason="length")
    other[0]["correct"] = None
    _, out, _ = judge(full, write(tmp_path / "other.jsonl", other))
    assert "note: 1 problem of full or other alone are left out: p30." in out
    assert "note: other: 248 answers of 248 were cut off at their longest." in out
    assert "note: other: 1 answer of 248 have no grade and are left out." in out


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no row of a graded output"),
    "no rows": (b"id,draw,correct\n", "no row of a graded output"),
    "no id": (b'{"correct": 1}\n', "has no problem's id"),
    "id of true": (b'{"id": true, "correct": 1}\n', "has no problem's id"),
    "id of a list": (b'{"id": ["a"], "correct": 1}\n', "has no problem's id"),
    "id of nothing": (b'{"id": "", "correct": 1}\n', "has no problem's id"),
    "no grade": (b'{"id": "a"}\n', "has no grade: name one with --correct"),
    "half right": (b'{"id": "a", "score": 0.5}\n', "score=0.5, which is neither right nor wrong"),
    "NaN": (b'{"id": "a", "correct": NaN}\n', "correct=nan, which is neither right nor wrong"),
    "infinite": (b'{"id": "a", "correct": 1e999}\n', "correct=inf, which is neither"),
    "words": (b'{"id": "a", "correct": "maybe"}\n', "correct=maybe, which is neither"),
    "a grade that is a list": (b'{"id": "a", "correct": [1]}\n', "which is neither right nor wrong"),
    "control characters": (b'{"id": "a", "correct": "\\u001b[2J"}\n', "correct=\\x1b[2J, which is neither"),
    "draw 10^30": (b'{"id": "a", "draw": 1000000000000000000000000000000, "correct": 1}\n', "has the draw 1000000000"),
    "draw below 0": (b'{"id": "a", "draw": -1, "correct": 1}\n', "has the draw -1"),
    "draw 1.5": (b'{"id": "a", "draw": 1.5, "correct": 1}\n', "has the draw 1.5"),
    "draw true": (b'{"id": "a", "draw": true, "correct": 1}\n', "whole number from 0"),
    "draw of words": (b'{"id": "a", "draw": "x", "correct": 1}\n', "has the draw x"),
    "twice": (b'{"id": "a", "correct": 1}\n' * 2, "has draw 0 of problem 'a' 2 times"),
    "a space apart": (b'{"id": "a b", "correct": 1}\n{"id": "a  b", "correct": 1}\n', "differ in spaces alone"),
    "torn": (b'{"id": "a", "correct": 1}\n{"id": "b", "cor', ":2 is no JSON object"),
    "a number a line": (b'{"id": "a", "correct": 1}\n5\n', ":2 is no JSON object"),
    "a list of numbers": (b"[1, 2]", "holds no list of rows"),
    "JSON of something": (b'{\n "a": 1}', "holds no list of rows"),
    "JSON that ends": (b'{\n "samples": [', "is no JSON that can be read"),
    "deep": (b"[" * 100_000, "cannot be read"),
    "not UTF-8": (b"id,correct\n\xff\xfe,1\n", "cannot be read"),
    "HTML": (b"<html><body>504</body></html>\n<p>\n", "has no problem's id"),
    "a quote that never ends": (b'id,correct\n"a,1\n', "cannot be read"),
    "half a Parquet": (b"PAR1xxxx", "is no Parquet file that can be read"),
    "half a zip": (b"PK\x03\x04xxxx", "cannot be read"),
    "two scores": (b'{"id": "a", "scores": {"x": {"value": "C"}, "y": {"value": "I"}}}\n', "has the grades x, y"),
    "partial credit": (b'{"id": "a", "scores": {"x": {"value": "P"}}}\n', "x=P, which is neither"),
    "two metrics": (b'{"doc_id": 1, "metrics": ["x", "y"], "x": 1, "y": 0}\n', "has the grades x, y"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_says_nothing_is_one_sentence(
    name: str, judge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    data, said = BAD_FILES[name]
    (tmp_path / "bad").write_bytes(data)
    code, _, err = judge(write(tmp_path / "full.jsonl", rows(3, 1)), tmp_path / "bad")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_a_zip_that_is_a_bomb_or_no_log(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as log, log.open("samples/a.json", "w") as part:
        for _ in range(80):
            part.write(b" " * (1 << 20))
    with pytest.raises(UserError, match="a sample of more than"):
        read_outputs(tmp_path / "bomb")
    with zipfile.ZipFile(tmp_path / "other", "w") as log:
        log.writestr("a.json", "{}")
    with pytest.raises(UserError, match="is a zip without samples"):
        read_outputs(tmp_path / "other")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["FULL"], "1 file and 1 name: give two files or more."),
        (["FULL", "FULL"], "two files are named full: give each a --name."),
        (["FULL", "OTHER", "--name", "x"], "2 files and 1 name"),
        (["FULL", "OTHER", "--full", "none"], "none names none of the files: choose from full, other."),
        (["FULL", "OTHER", "--bytes", "x=0.5"], "x names none of the files"),
        (["FULL", "OTHER", "--bytes", "other=half"], "--bytes other=half must be a number above 0"),
        (["FULL", "OTHER", "--bytes", "other"], "other is no NAME=VALUE"),
        (["FULL", "OTHER", "--where", "draw=9"], "no row of a graded output with that --where"),
        (["FULL", "OTHER", "--correct", "nothing"], "has no grade: name one with --correct"),
        (["FULL", "GOLD"], "full and gold have another gold for problem 'p0'"),
        (["FULL", "PROMPT", "PROMPT2"], "full and prompt have another prompt for problem 'p0'"),
        (["FULL", "APART"], "full and apart share no graded pair of problem and draw"),
        (["FULL", "missing.jsonl"], "missing.jsonl cannot be read (No such file or directory)"),
        (["FULL", "PIPE"], "is no plain file"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], said: str, judge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    items = {"full": rows(3, 1, prompt="a"), "other": rows(3, 1), "gold": [row | {"gold": "8"} for row in rows(3, 1)]}
    items |= {"prompt": rows(3, 1, prompt="b"), "prompt2": rows(3, 1, prompt="b")}
    items |= {"apart": [row | {"id": f"q{row['id']}"} for row in rows(3, 1)]}
    files = {name.upper(): write(tmp_path / f"{name}.jsonl", some) for name, some in items.items()}
    os.mkfifo(tmp_path / "pipe")
    code, _, err = judge(*(files.get(word, tmp_path / "pipe" if word == "PIPE" else word) for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
