"""`kvsweep export --format`: inspect logs as a reader of real ones reads them, and Every Eval Ever's records.

inspect_ai 0.3.285 and every_eval_ever 0.3.0, which are no packages of the project, read such files without an error.
"""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from kvsweep.analysis.outputs import Reading, read_outputs
from kvsweep.run_files.row_types import Completion
from kvsweep.run_files.run_reader import StoredCell, stored_cells

STORED = Path(__file__).parents[1] / "stored" / "8ed060b"
PLACE = re.compile(
    r"data/toy_add/unknown/toy_qwen/[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.json"
)


@pytest.fixture
def run(tmp_path, kvsweep):
    folder = Path(shutil.copytree(STORED, tmp_path / "run"))
    assert kvsweep("grade", str(folder)).code == 0  # by the rule of today
    return folder


def test_logs_of_inspect_ai_have_the_texts_and_grades_of_each_draw(run, kvsweep):
    assert kvsweep("export", str(run), "--format", "inspect").code == 0
    for cell in stored_cells(run):
        texts = {row.key: row for row in cell.rows(Completion)}
        grades = cell.grades()
        path = run / "export_inspect" / f"{cell.name}.json"
        found = {(row.problem_id, row.draw): row for row in read_outputs([path], Reading()).answers.itertuples()}
        assert {key: one.correct for key, one in found.items()} == {key: one.correct for key, one in grades.items()}
        cut_off = {key for key, text in texts.items() if text.stop_reason == "length"}
        assert {key for key, one in found.items() if one.ending == "length"} == cut_off
        log = json.loads(path.read_text())
        assert [one["output"]["choices"][0]["message"]["content"] for one in log["samples"]] == [
            texts[key].text for key in sorted(texts)
        ]


def test_records_of_every_eval_ever_have_pass_at_1_and_its_error(run, kvsweep):
    assert kvsweep("export", str(run), "--format", "eee").code == 0
    folder = run / "export_eee"
    records = {}
    for path in folder.rglob("*.json"):
        assert PLACE.fullmatch(path.relative_to(folder).as_posix())
        record = json.loads(path.read_text())
        [result] = record["evaluation_results"]
        records[result["evaluation_result_id"]] = result
        assert record["schema_version"] == "0.3.0"
        texts = [record["model_info"]["additional_details"], result["generation_config"]["additional_details"]]
        assert all(isinstance(value, str) for one in texts for value in one.values())
    assert len(records) == 3
    for cell_id, result in records.items():
        problems = {}
        for grade in StoredCell(run / cell_id).grades().values():
            problems.setdefault(grade.problem_id, []).append(grade.correct)
        means = [sum(draws) / len(draws) for draws in problems.values()]
        details = result["score_details"]
        assert details["score"] == pytest.approx(sum(means) / len(means))
        if len(means) > 1:
            error = math.sqrt(sum((mean - details["score"]) ** 2 for mean in means) / (len(means) - 1) / len(means))
            assert details["uncertainty"]["standard_error"]["value"] == pytest.approx(error)


def test_what_goes_with_parquet_alone_is_refused(run, refused):
    assert "go with --format parquet alone" in refused("export", run, "--format", "eee", "--token-ids")
    assert "--cell nope is not in" in refused("export", run, "--format", "eee", "--cell", "nope")


def test_texts_of_gated_problems_stay_at_home(run, kvsweep):
    for path in run.glob("*/cell.yaml"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("check:")]
        path.write_text("\n".join(lines).replace("licence: null", "licence: gated") + "\n")
    for words, shown in (((), False), (("--with-problems",), True)):
        assert kvsweep("export", str(run), "--format", "inspect", *words).code == 0
        samples = [one for path in run.glob("export_inspect/*.json") for one in json.loads(path.read_text())["samples"]]
        asked = {one["input"] for one in samples} | {
            message["content"] for one in samples for message in one["messages"][:1]
        }
        assert ("The problem's licence does not allow to publish it." not in asked) == shown
        assert len(asked) == (2 if shown else 1)
