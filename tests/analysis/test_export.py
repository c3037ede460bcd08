"""The exported dataset is what the files hold, opens with `datasets`, and keeps to itself what is not ours."""

import json
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import DatasetCard, HfApi
from huggingface_hub.utils import filter_repo_objects

from kvsweep.analysis import export as module
from kvsweep.analysis.export import export, push
from kvsweep.harness.settings import CONF
from kvsweep.messages.errors import UserError
from kvsweep.run_files.run_reader import StoredCell
from tests.analysis.conftest import write_rows
from tests.program import export as main

GATED = yaml.safe_load((CONF / "benchmark/gpqa_diamond.yaml").read_text())["licence"]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.parent / "cache"))
    assert isinstance(found, datasets.Dataset)
    return found.to_list()


def ask(folder: Path):
    """Give the cell its problems."""
    ids = {json.loads(line)["problem_id"] for line in (folder / "completions.jsonl").read_text().splitlines()}
    problems = [{"id": name, "prompt": f"What is {name}?", "gold": "4"} for name in sorted(ids)]
    write_rows(folder / "problems.jsonl", problems)


def test_every_row_arrives_with_its_cell_and_grade(make_cell):
    full = make_cell([[1, 0], [1, "truncated"]])
    dynts = make_cell([[1, None]], policy="dynts", done=False)
    ask(full)
    folder, notices = export(full.parent)
    assert notices == []
    rows = {(row["cell_id"], row["problem_id"], row["draw"]): row for row in rows_of(folder)}
    assert len(rows) == 6
    first = rows[full.name, "p0", 0]
    assert {"variant", "fork_step"} <= first.keys()
    assert "token_ids" not in first
    stored = json.loads((full / "completions.jsonl").read_text().splitlines()[0])
    for name in ("text", "num_tokens", "prompt_tokens", "thinking_tokens", "stop_reason", "evictions", "peak_length"):
        assert first[name] == stored[name]
    expected = {"policy": "full", "keep_ratio": None, "budget": None, "model": "toy_qwen", "seed": 0, "draw": 0}
    expected |= {"prompt": "What is p0?", "answer": "4", "gold": "4", "outcome": "correct", "correct": True}
    assert {name: first[name] for name in expected} == expected
    assert rows[full.name, "p1", 1]["outcome"] == "truncated"
    assert rows[full.name, "p1", 1]["correct"] is False
    ungraded = rows[dynts.name, "p0", 1]
    assert (ungraded["outcome"], ungraded["correct"], ungraded["prompt"]) == (None, None, None)
    assert (ungraded["keep_ratio"], ungraded["local_window"], ungraded["budget"]) == (0.3, 48, 128)
    assert ungraded["evictions"][0] == {"step": 89, "length_before": 129, "length_after": 72}


def test_the_card_describes_what_is_there(make_cell):
    run = make_cell([[1, 0], [1, 1]]).parent
    make_cell([[1, 0], [1, "truncated"]], policy="dynts", done=False)
    folder, _ = export(run)
    card = DatasetCard.load(folder / "README.md")
    (config,) = card.data.to_dict()["configs"]
    assert (config["config_name"], config["data_files"]) == ("default", "data/*.parquet")
    assert card.data.license == "other"
    assert "8 completions of 2 cells" in card.text
    assert "`r1` (max_new_tokens 400, temperature 0.6). Code: commit 0123abcd." in card.text
    # Mean over problems of the mean over draws: (1/2 + 1) / 2 and (1/2 + 1/2) / 2.
    (full,) = [line for line in card.text.splitlines() if "| full cache |" in line]
    (dynts,) = [line for line in card.text.splitlines() if "| DynTS 0.3 / 48, trigger 128 |" in line]
    assert full.endswith("| 4 | 75.0 | 0.0 |")
    assert dynts.endswith("| 4 (unfinished) | 50.0 | 0.0 |")
    described = {
        line.split("|")[1].strip(" `") for line in card.text.split("## Columns")[1].splitlines() if "| `" in line
    }
    assert described == set(pq.read_schema(next(folder.glob("data/*.parquet"))).names)


def test_random_weights_have_no_accuracy(make_cell):
    folder = make_cell([[1]], cell={"model": {"random_weights": True}})
    text = (export(folder.parent)[0] / "README.md").read_text()
    assert "| full cache | 1 | – | 0.0 |" in text


def test_gated_problems_stay_at_home_unless_asked_for(make_cell):
    cell = make_cell([[1]], cell={"benchmark": {"licence": GATED}})
    ask(cell)
    folder, _ = export(cell.parent)
    assert [row["prompt"] for row in rows_of(folder)] == [None]
    assert "their texts are not included" in (folder / "README.md").read_text()
    assert not [path for path in folder.rglob("*") if path.is_file() and b"What is p0?" in path.read_bytes()]
    export(cell.parent, problems=True)
    assert pq.read_table(next(folder.glob("data/*"))).column("prompt").to_pylist() == ["What is p0?"]
    assert "their texts are included" in (folder / "README.md").read_text()


def test_one_cell_by_its_name(make_cell):
    full = make_cell([[1]])
    dynts = make_cell([[1], [0]], policy="dynts")
    whole, _ = export(full.parent)
    assert {path.stem for path in whole.glob("data/*")} == {full.name, dynts.name}
    export(full.parent, cells=[full.name])
    # The file of the cell that was there before is gone: the card speaks of this one alone.
    assert [path.stem for path in whole.glob("data/*")] == [full.name]
    with pytest.raises(UserError, match="--cell nothing"):
        export(full.parent, cells=["nothing"])


def test_broken_and_torn_lines_are_told_once_and_passed_over(make_cell):
    cell = make_cell([[1, 0]])
    with (cell / "completions.jsonl").open("a") as file:
        file.write('{"schema": 1, "problem_id": 3}\n{"problem_id": "p0", "dr')
    folder, notices = export(cell.parent)
    assert pq.read_table(next(folder.glob("data/*"))).num_rows == 2
    assert len(notices) == 1


def test_half_a_surrogate_pair_becomes_a_mark_and_token_ids_come_where_they_are_asked_for(make_cell):
    cell = make_cell([[1]], completion={"text": "so \ud83d."})
    [row] = rows_of(export(cell.parent, ids=True)[0])
    assert (row["text"], row["token_ids"]) == ("so ?.", [5, 6, 7, 2])


def test_rows_are_written_group_by_group(make_cell, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    cell = make_cell([[1, 0, 1, 0], [1, 1, 1, 1]])
    read, alive = StoredCell.rows, []

    def watched(cell, kind, **how):
        for row in read(cell, kind, **how):
            if kind.file != "completions.jsonl":
                yield row
                continue
            written = sum(len(group) for group in groups)
            alive.append(len(alive) + 1 - written)
            yield row

    def sliced(rows, most):
        groups.append(list(islice(rows, most)))
        return groups[-1]

    groups: list[list[Any]] = []
    monkeypatch.setattr(StoredCell, "rows", watched)
    monkeypatch.setattr(module, "islice", sliced)
    (path,) = export(cell.parent)[0].glob("data/*")
    assert pq.ParquetFile(path).num_row_groups == 3
    assert max(alive) == 3


def test_another_export_of_the_same_size_is_not_taken_for_the_first(make_cell):
    path = make_cell([[1]], completion={"text": "So 4."}) / "completions.jsonl"
    written, cards = path.read_text(), []
    for text in ("So 4.", "So 5.", "So 5."):
        path.write_text(written.replace("So 4.", text))
        folder, _ = export(path.parents[1])
        cards.append((folder / "README.md").read_text())
        assert [row["text"] for row in rows_of(folder)] == [text]
    assert cards[1] == cards[2] != cards[0]


def test_a_folder_of_another_kind_is_left_alone(make_cell, tmp_path):
    run = make_cell([[1]]).parent
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds something else"):
        export(run, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_an_export_that_was_cut_short_is_made_again(make_cell, monkeypatch):
    run = make_cell([[1]]).parent

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            export(run)
    folder, _ = export(run)
    assert len(rows_of(folder)) == 1
    assert "Not finished" not in (folder / "README.md").read_text()


# --- The command --------------------------------------------------------------------------------------------


def test_the_command_says_where_it_lies(make_cell, capsys):
    run = make_cell([[1], [0]]).parent
    main([str(run)])
    folder, line, end = capsys.readouterr().out.split("\n")
    assert (folder, end) == (str(run / "export"), "")
    rows, _, code = line.partition("; in Python: ")
    assert rows == "2 rows"
    assert eval(code, {"datasets": datasets}).num_rows == 2


def test_a_place_that_cannot_be_read_or_written_is_one_sentence(make_cell, tmp_path, refused):
    cell = make_cell([[1]])
    assert "missing" in refused("export", tmp_path / "missing")
    assert str(tmp_path) in refused("export", tmp_path)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file/export: Not a directory" in refused(
        "export", cell.parent, "--output", tmp_path / "file/export"
    )
    (cell / "grades.jsonl").unlink()
    (cell / "grades.jsonl").mkdir()
    assert f"{cell}/grades.jsonl is no plain file" in refused("export", cell.parent)


def test_pushing_without_a_login_reads_nothing(make_cell, monkeypatch, refused):
    run = make_cell([[1]]).parent
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "hf auth login" in refused("export", run, "--push-to-hub", "me/texts")
    assert not (run / "export").exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """What reaches the hub while somebody is logged in; a dataset there has files of an earlier upload."""
    sent: list[Any] = []

    def create_repo(self, name, *, repo_type, private, exist_ok):
        sent.append({"type": repo_type, "private": private, "may be there": exist_ok})
        return SimpleNamespace(repo_id=f"me/{name.rpartition('/')[2]}")

    def upload_folder(self, *, folder_path, allow_patterns, delete_patterns, **where):
        names = sorted(path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file())
        new, old = (
            list(filter_repo_objects(files, allow_patterns=patterns))
            for files, patterns in ((names, allow_patterns), (earlier, delete_patterns))
        )
        sent.append({**where, "new": new, "gone": sorted({*old} - {*new})})

    def repo_info(self, name, *, repo_type):
        siblings = [SimpleNamespace(rfilename=name) for name in (".gitattributes", *earlier)]
        return SimpleNamespace(private=sent[-1]["private"], siblings=siblings)

    earlier = ["README.md", "data/train-00000-of-00001.parquet", "notes.txt", "replayed.parquet"]
    (tmp_path / "card.md").write_text("---\ntags:\n- kvsweep\n---\n")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    monkeypatch.setattr(HfApi, "hf_hub_download", lambda *_, **__: str(tmp_path / "card.md"))
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return sent


@pytest.mark.parametrize(("options", "private"), [([], True), (["--public"], False)])
def test_pushing_sends_the_exports_files_and_deletes_those_of_an_earlier_one(options, private, make_cell, hub):
    cell = make_cell([[1, 0]])
    main([str(cell.parent)])
    (cell.parent / "export/mine.txt").touch()
    main([str(cell.parent), "--push-to-hub", "texts", *options])
    assert hub == [
        {"type": "dataset", "private": private, "may be there": True},
        {
            "repo_id": "me/texts",
            "repo_type": "dataset",
            "new": ["README.md", f"data/{cell.name}.parquet"],
            "gone": ["data/train-00000-of-00001.parquet", "replayed.parquet"],
        },
    ]


@pytest.mark.parametrize(
    ("private", "files", "public", "said"),
    [
        (False, ["README.md"], False, "is a public dataset: add --public"),
        (True, ["README.md", "data/theirs.parquet"], False, "holds something else"),
        (False, ["data/theirs.parquet"], True, "holds something else"),
        (True, [], False, None),
        (False, [], True, None),
    ],
)
def test_a_dataset_that_is_public_or_not_ours_gets_nothing(private, files, public, said, hub, tmp_path, monkeypatch):
    siblings = [SimpleNamespace(rfilename=name) for name in (".gitattributes", *files)]
    found = SimpleNamespace(private=private, siblings=siblings)
    monkeypatch.setattr(HfApi, "repo_info", lambda *_, **__: found)
    (tmp_path / "card.md").write_text("---\ntags:\n- theirs\n---\n")
    with pytest.raises(UserError, match=said) if said else nullcontext():
        push(tmp_path, "texts", public=public)
    assert len(hub) == (1 if said else 2)


def test_a_hub_that_cannot_be_reached_is_one_sentence(make_cell, hub, monkeypatch, kvsweep):
    run = make_cell([[1]]).parent

    def refuse(self, **_):
        # The hub's transport raises errors of its own, which are no OSError.
        raise type("ConnectError", (Exception,), {})("no\nroute")

    monkeypatch.setattr(HfApi, "upload_folder", refuse)
    code, _, said = kvsweep("export", str(run), "--push-to-hub", "me/texts")
    assert (code, said.count("\n"), "me/texts failed (no route)" in said) == (2, 1, True)
    assert (run / "export/README.md").is_file()
