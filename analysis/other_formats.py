"""`kvsweep export --format eee|inspect`: a JSON file per cell, in the form that other programs read.

eee is Every Eval Ever's record of an evaluation (github.com/evaleval/every_eval_ever at 9bce413, schema 0.3.0), inspect
a log of inspect_ai (version 2 of its EvalLog), whose epochs are the draws.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

import pandas as pd

from kvsweep.analysis.export import GATED, chosen
from kvsweep.analysis.load import Run, load_problems, load_run, load_texts
from kvsweep.analysis.notation import rows, setting
from kvsweep.analysis.statistics.metrics import cell_metrics
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import leaves
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import make_folder, replace_text

Record = Mapping[str, Any]  # a JSON object
# inspect_ai's words for a text that was cut off, and for one that ended.
_ENDS = {"stop": "stop", "length": "max_tokens", "loop": "max_tokens", "not_finite": "unknown"}
_WITHHELD = "The problem's licence does not allow to publish it."


def export_as(name: str, directory: Path, output: Path | None, *, cells: Sequence[str], problems: bool) -> Path:
    """Write a file for each cell with completions, all or the named ones; return their folder, DIR/export_NAME.

    `problems` includes the texts of problems that may not be republished.
    """
    run = load_run(directory)
    metrics = chosen(cell_metrics(run), cells, directory)
    folder = make_folder(output.resolve() if output else directory.resolve() / f"export_{name}")
    for cell in rows(metrics[metrics["completions"] > 0]):
        if name == "eee":
            place, record = _eee(run, cell)
        else:
            place, record = f"{cell.cell_id}.json", _inspect(run, cell, problems)
        make_folder((folder / place).parent)
        replace_text(folder / place, f"{json.dumps(record, indent=1, allow_nan=False)}\n")
    return folder


def _eee(run: Run, cell: Any) -> tuple[str, Record]:
    """The record of a cell, a row of cells.csv: who made it, its model, and its result if it has a Pass@1.

    Before it the path that Every Eval Ever's validator asks for; the same cell has the same one in every export.
    """
    settings = run.settings[cell.cell_id]
    provenance = run.provenance[cell.cell_id]
    engine = {"name": "kvsweep", "version": version("kvsweep")}
    # Weights from the hub are written ID@COMMIT, others without @.
    hub_id, at, _ = str(settings["model"].get("weights")).partition("@")
    model_id = hub_id if at else cell.model
    developer, _, model_name = model_id.rpartition("/")
    developer = developer or "unknown"
    record = {
        "schema_version": "0.3.0",
        "evaluation_id": f"{cell.benchmark}/{cell.model}/{cell.cell_id}",
        **_not_missing(evaluation_timestamp=_started(provenance)),
        "retrieved_timestamp": str(int(time.time())),
        "source_metadata": {
            "source_name": "kvsweep",
            "source_type": "evaluation_run",
            "source_organization_name": "unknown",
            "evaluator_relationship": "other",
        },
        "eval_library": engine,
        "model_info": {
            "name": cell.model_title,
            "id": model_id,
            "developer": developer,
            "inference_engine": engine,
            "additional_details": {
                "deployment_type": "self_deployed",
                "model_availability": "unknown",
                **_texts(settings["model"]),
            },
        },
        "evaluation_results": [_result_in_eee(cell, settings, provenance)] if pd.notna(cell.pass_at_1) else [],
    }
    # Not a random one, though version 4 says so: the id's hash.
    number = UUID(bytes=hashlib.sha256(cell.cell_id.encode()).digest()[:16], version=4)
    return f"data/{cell.benchmark}/{developer}/{model_name}/{number}.json", record


def _result_in_eee(cell: Any, settings: Record, provenance: Record) -> Record:
    """The result of a cell: its Pass@1 with error and interval over problems, and how its texts were drawn."""
    source = {"dataset_name": cell.benchmark_title, "source_type": "other"}
    dataset = settings["benchmark"].get("hub_id")
    if dataset:
        split = _not_missing(hf_split=settings["benchmark"].get("split"))
        source |= {"source_type": "hf_dataset", "hf_repo": dataset, **split}
    score = {
        "score": cell.pass_at_1,
        "details": _texts({"graded": cell.graded, "draws": cell.draws, "diff_to_full": cell.diff_to_full}),
    }
    if pd.notna(cell.se):
        score["uncertainty"] = {
            "standard_error": {"value": cell.se, "method": "clustered by problem"},
            "confidence_interval": {
                "lower": cell.ci_low,
                "upper": cell.ci_high,
                "confidence_level": 0.95,
                "method": "over problems like these",
            },
            "num_samples": int(cell.problems),
        }
    return {
        "evaluation_result_id": cell.cell_id,
        "evaluation_name": cell.benchmark,
        "source_data": source | {"additional_details": _texts({"dataset_hash": cell.dataset_hash})},
        "metric_config": {
            "metric_id": "pass@1",
            "metric_name": "Pass@1",
            "metric_kind": "accuracy",
            "metric_unit": "proportion",
            "lower_is_better": False,
            "score_type": "continuous",
            "min_score": 0,
            "max_score": 1,
        },
        "score_details": score,
        "generation_config": {
            "generation_args": {**_sampling(settings), "execution_command": _command(provenance)},
            "additional_details": _texts(dict(leaves({"policy": settings["policy"], "seed": cell.seed}))),
        },
    }


def _inspect(run: Run, cell: Any, problems: bool) -> Record:
    """The log of a cell: a sample per completion, with the grade as its score."""
    settings = run.settings[cell.cell_id]
    provenance = run.provenance[cell.cell_id]
    model = f"kvsweep/{cell.model}"
    withheld = GATED in str(settings["benchmark"].get("licence")) and not problems
    samples = _samples(run.directory / cell.cell_id, model, withheld)
    ids = list(dict.fromkeys(sample["id"] for sample in samples))
    scored = sum(bool(sample["scores"]) for sample in samples)
    score = {
        "name": "kvsweep",
        "scorer": "kvsweep",
        "scored_samples": scored,
        "unscored_samples": len(samples) - scored,
        "metrics": {"accuracy": {"name": "accuracy", "value": cell.pass_at_1}} if pd.notna(cell.pass_at_1) else {},
    }
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": cell.cell_id,
            "run_id": run.directory.resolve().name,
            # The form demands a time.
            "created": _started(provenance) or "1970-01-01T00:00:00+00:00",
            "task": cell.benchmark,
            "task_id": cell.cell_id,
            "task_args": dict(leaves({"policy": settings["policy"]})),
            "dataset": {"name": cell.benchmark, "samples": len(ids), "sample_ids": ids},
            "model": model,
            "model_args": _not_missing(**settings["model"]),
            "config": {"epochs": max(sample["epoch"] for sample in samples)},
            "packages": {"kvsweep": version("kvsweep")},
            "metadata": {"setting": setting(cell), "command": _command(provenance)},
        },
        "plan": {"config": {**_sampling(settings), "seed": settings.get("seed")}},
        "results": {"total_samples": len(samples), "completed_samples": len(samples), "scores": [score]},
        "samples": samples,
    }


def _samples(folder: Path, model: str, withheld: bool) -> list[Record]:
    """A sample for each completion of a cell, by problem and draw; of a missing problem prompt and gold are empty."""
    texts = load_texts(folder)
    grades = StoredCell(folder).grades(on_bad=row_types.ignore)
    problems = load_problems(folder)
    samples = list[Record]()
    for pair, completion in sorted(texts.items()):
        prompt = gold = ""
        if completion.problem_id in problems:
            problem = problems[completion.problem_id]
            prompt = _WITHHELD if withheld else problem.prompt
            gold = problem.gold
        scores = {}
        if pair in grades:
            grade = grades[pair]
            value = "C" if grade.correct else "I"
            scores["kvsweep"] = {"value": value, "explanation": grade.outcome, **_not_missing(answer=grade.answer)}
        message = {"role": "assistant", "content": completion.text, "model": model}
        usage = {"input_tokens": completion.prompt_tokens, "output_tokens": completion.num_tokens}
        sample = {
            "id": completion.problem_id,
            "epoch": completion.draw + 1,
            "input": prompt,
            "target": gold,
            "messages": [{"role": "user", "content": prompt}, message],
            "output": {
                "model": model,
                "choices": [{"message": message, "stop_reason": _ENDS[completion.stop_reason]}],
                "usage": {**usage, "total_tokens": sum(usage.values())},
            },
            "scores": scores,
            "metadata": {"evictions": len(completion.evictions), "peak_length": completion.peak_length},
        }
        samples.append(sample)
    return samples


def _sampling(settings: Record) -> Record:
    """How the texts were drawn, by the names that both forms have."""
    decoding = settings["decoding"]
    return _not_missing(
        temperature=decoding.get("temperature"),
        top_p=decoding.get("top_p"),
        # 0 sets no limit.
        top_k=decoding.get("top_k") or None,
        max_tokens=decoding.get("max_new_tokens"),
    )


def _not_missing(**values: Any) -> Record:
    # NaN is not equal to itself.
    return {name: value for name, value in values.items() if value is not None and value == value}


def _texts(values: Record) -> dict[str, str]:
    """The values that are not missing, as texts."""
    return {name: str(value) for name, value in _not_missing(**values).items()}


def _command(provenance: Record) -> str:
    """The command of the first decoding pass that names one, or ""."""
    for decoding_pass in provenance.get("decoding_passes", []):
        words = decoding_pass.get("command")
        if isinstance(words, list):
            return shlex.join(map(str, words))
    return ""


def _started(provenance: Record) -> str | None:
    """When the first decoding pass began, as ISO 8601 has it."""
    passes = provenance.get("decoding_passes", [])
    times = [str(decoding_pass["started"]) for decoding_pass in passes if decoding_pass.get("started")]
    return min(times, default=None)
