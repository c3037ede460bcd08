"""`kvsweep KEY=VALUE ...`: compose, check everything, launch. `kvsweep init` makes a user's folder."""

import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from kvsweep.annexes import annex
from kvsweep.compression import artifacts
from kvsweep.compression.policy import Policy
from kvsweep.harness import settings
from kvsweep.harness.overrides import hydra_overrides
from kvsweep.harness.rounds import run
from kvsweep.harness.sweep.card import AssumeConfig, CostConfig
from kvsweep.harness.sweep.grid import policy_file
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.harness.sweep.launch import Inline, Launcher, split
from kvsweep.harness.sweep.replay_plan import ReplayPlan
from kvsweep.harness.sweep.share import share_of
from kvsweep.harness.sweep.source import source_class
from kvsweep.harness.sweep.unused import refuse_unused, unused_settings
from kvsweep.harness.toy.tasks import problems
from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError, plain_disk_errors
from kvsweep.run_files.row_types import Shard
from kvsweep.run_files.run_reader import read_cells

TEMPLATE = Path(__file__).resolve().parent / "template"
# A command with none of these runs the default policy and, to compare with, the full cache.
_NAMES_CELLS = ("policy", "grid", "experiment")
_NAMES_MODEL = ("model=", "model.name=", "experiment=")
# Hydra's options that a sweep cannot have, by their shortest forms.
_REFUSED: dict[str | tuple[str, ...], str] = {
    ("--config-n", "-cn"): "a sweep has one configuration; experiment=NAME chooses what changes it",
    "--experimental-rerun": "provenance.json of a cell has the command to run again",
}


def sweep(words: Sequence[str]) -> None:
    """Compose the jobs that the command line's words name, check them all, and launch them or show what was asked."""
    for option, instead in _REFUSED.items():
        for word in words:
            if word.startswith(option):
                raise UserError(f"{word} is no option here: {instead}.")
    dry_run = "--dry-run" in words
    # Hydra, which would refuse an option that it does not know, takes the words from here.
    sys.argv = ["kvsweep", *(word for word in words if word != "--dry-run")]
    # Without this Hydra prints its own errors and exits with code 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with artifacts.planning() if dry_run else nullcontext():
        jobs, launcher, plan = collect_jobs()
    if not jobs:  # Hydra printed what was asked for, as by --cfg or --info
        return
    if dry_run:
        _print_estimate(jobs, launcher, plan)
    elif any(job.card or job.cost != CostConfig() or job.assume != AssumeConfig() for job in jobs):
        raise UserError("card=, cost.* and assume.* say what to estimate, and nothing is decoded there: add --dry-run.")
    else:
        run(jobs, launcher, plan)


def _print_estimate(jobs: Sequence[Job], launcher: Launcher, plan: ReplayPlan) -> None:
    """Print what the jobs would take, and what the estimate leaves open."""
    jobs, open_points = annex("screen").to_estimate(jobs, launcher, plan)
    if jobs:
        tasks = split([share_of(job) for job in jobs], launcher)
        print(annex("plan").describe(tasks, launcher))
    else:
        print("Nothing is decoded.")
    if open_points:
        print(open_points)
    if any(job.rounds and not job.finish for job in jobs):
        print("With until=decided this is the most that can come: a decided cell gets no more draws.")


def collect_jobs() -> tuple[list[Job], Launcher, ReplayPlan]:
    """Compose and check every job of the command line before any job runs."""
    jobs: list[Job] = []
    shared: list[tuple[Launcher, ReplayPlan]] = []  # of each job
    unused: list[dict[str, str]] = []  # the keys that a job does not use, each with the reason
    notes: set[str] = set()
    for config, hydra_config in _compose():
        HydraConfig.instance().cfg = hydra_config  # the job's, for ${hydra:...} in its values
        with settings.plain_config_errors():
            # These lines change the configuration.
            source_class(config).check(config)
            notes.update([*_complete(config), *_not_swept()])
            others_settings = _without_others_settings(config)
            # From here on things are made from it.
            launcher = settings.build_target("launcher", config.launcher, Launcher)
            replayed = OmegaConf.masked_copy(config, ["replay", "screen", "texts"])
            shared.append((launcher, checked(ReplayPlan, settings.plain(replayed))))
            jobs.append(make_job(config))
            unused.append(unused_settings(config, jobs[-1]) | others_settings)
    if not jobs:
        return [], Inline(), ReplayPlan()
    for note in sorted(notes):
        print(note, file=sys.stderr)
    refuse_unused([word.lstrip("+") for word in sys.argv[1:] if not word.startswith("-")], unused)
    launcher, plan = shared[0]
    if any(other != shared[0] for other in shared):
        raise UserError("launcher, replay, screen or texts differ between the jobs of a command: give each one value.")
    # Reading refuses cells of another schema.
    stored = []
    for directory in {job.run_directory for job in jobs}:
        stored += [cell for _, cell in read_cells(directory)]
    no_full_cache = _no_full_cache(jobs, stored)
    if no_full_cache:
        print(no_full_cache, file=sys.stderr)
    return _without_shared_cells(jobs, plan), launcher, plan


def _no_full_cache(jobs: Sequence[Job], stored: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a note for a multirun without a full cache to compare with, with the words to write; else None.

    `stored` are the settings (cell.yaml) of the cells that the jobs' folders have.
    """
    if {"-m", "--multirun"}.isdisjoint(sys.argv):
        return None
    # A server's names are no policies that a grid could list.
    policies = dict[str, None]()  # in the jobs' order
    for job in jobs:
        if job.source.local:
            policies.update(dict.fromkeys(cell.policy.name for cell in job.cells))
    has_full = "full" in policies or any(cell.get("policy", {}).get("name") == "full" for cell in stored)
    if has_full or not policies:
        return None
    none = "no full cache is among the cells to compare them with, and jobs share no texts"
    words = f"'grid.policy=[full,{','.join(policies)}]', and other lists of the policy in the same way"
    return f"note: {none}: write {words}, as 'grid.keep_ratio=[0.1,0.2]'."


def _without_others_settings(config: DictConfig) -> dict[str, str]:
    """Remove a multirun policy's settings that only other policies have; return the keys and the reason."""
    hydra_config: Any = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        return {}
    # With -m policy=A,B policy.KEY=V each job gets the key, also that of the policy which has no such setting.
    of_class = {field.name for field in fields(settings.target_class("policy", config.policy, Policy))}
    of_file = policy_file(hydra_config.runtime.choices["policy"]).keys()  # has the other spelling of a size, too
    others = config.policy.keys() - of_class - of_file
    with open_dict(config):
        for name in others:
            del config.policy[name]
    return {f"policy.{name}": "no policy of the command takes it" for name in others}


def _without_shared_cells(jobs: Sequence[Job], plan: ReplayPlan) -> list[Job]:
    """Return the jobs without cells that an equal job before them has; refuse unequal jobs that share cells."""
    remaining: list[Job] = []
    first_jobs: dict[tuple[Path, Shard, str], Job] = {}  # of each cell
    notes: set[str] = set()
    for job in jobs:
        rest = []
        for cell in job.cells:
            first = first_jobs.setdefault((job.run_directory, job.shard, cell.cell_id), job)
            if first is job:
                rest.append(cell)
                continue
            differing = job.differing(first)
            if differing:
                both = f"{job.name}: two jobs of this command have the same cells and differ in {', '.join(differing)}"
                raise UserError(f"{both}: give one value, or start one command after the other.")
            if job.benchmark.name != first.benchmark.name:
                notes.add(f"benchmark={job.benchmark.name} asks the problems of benchmark={first.benchmark.name}")
        # Rounds and replays compare a job's cells with its full cache, so such a job stays whole, unless all of its
        # cells are shared.
        if rest:
            remaining.append(job if job.rounds or plan.wanted else replace(job, cells=tuple(rest)))
    for note in sorted(notes):
        print(f"note: {note}: their cells are the same, and are decoded once.", file=sys.stderr)
    return remaining


def _complete(config: DictConfig) -> list[str]:
    """Fill in what the arguments leave open; return the note of `_name_model`."""
    words = [word.lstrip("+") for word in HydraConfig.get().overrides.task]
    for word in words:
        if config.get("protocol") and word.startswith("decoding="):
            both = f"protocol={config.protocol.name} and {word} both set the decoding"
            raise UserError(f"{both}: leave one out, or give decoding.KEY=VALUE beside the protocol.")
    # No word says which cells: take the default policy, and the full cache to compare it with.
    if not any(word.startswith(_NAMES_CELLS) for word in words):
        config.grid.policy = ["full", config.policy.name]
    return _name_model(config, words)


def _name_model(config: DictConfig, words: Sequence[str]) -> list[str]:
    """Name a model after its path, or as its server calls it, if the words give no name; return a note of that."""
    # The keys that say where the model is, or what a server calls it; the last one counts.
    keys = [word.partition("=")[0] for word in words if word.startswith(("model.path=", "model.gguf="))]
    if OmegaConf.select(config, "engine.model") is not None:
        keys.append("engine.model")
    if not keys or any(word.startswith(_NAMES_MODEL) for word in words):
        return []
    # The last part of the path, so that results never carry the default model's name: "models/My model" -> "My_model".
    place = Path(str(OmegaConf.select(config, keys[-1]))).absolute().name
    name = re.sub(r"[^\w.-]+", "_", place)
    if not name:  # the path is /
        return []
    lent = f"takes {source_class(config).lent} of {config.model.name}"
    config.model.name = config.model.title = name
    return [f"note: model={name} {lent}: choose the nearest with model=."]


def _not_swept() -> list[str]:
    """Return a note for each list of an experiment that only a multirun uses."""
    hydra_config: Any = HydraConfig.get()
    swept = OmegaConf.select(hydra_config, "sweeper.params")  # hydra.sweeper=3 has none, and only a multirun reads it
    if hydra_config.mode != RunMode.RUN or not OmegaConf.is_dict(swept):
        return []
    keys = {word.partition("=")[0] for word in hydra_config.overrides.task}
    notes = []
    for key, values in swept.items():
        if key not in keys:
            notes.append(f"note: {key}={values} needs -m; without it {key} is the default.")
    return notes


def _compose() -> list[tuple[DictConfig, Any]]:
    """Let Hydra read the command line, which it takes from sys.argv; return each job's configuration, and Hydra's own.

    They are checked once Hydra has ended, which prints its own lines about an error that passes through it. An error of
    Hydra's in a setting of its own becomes a UserError.
    """
    typed = sys.argv
    configs: list[tuple[DictConfig, Any]] = []

    def collect(config: DictConfig) -> None:
        configs.append((config, HydraConfig.instance().cfg))

    try:
        with settings.plain_config_errors():
            multirun = not {"-m", "--multirun"}.isdisjoint(typed)
            words = hydra_overrides(typed[1:], settings.target_classes, multirun=multirun)
            if not any(argument.startswith("hydra.searchpath=") for argument in typed):
                words += settings.own_overrides()
            # Hydra takes no KEY=VALUE between options, so these words come first: False sorts before True.
            sys.argv = [typed[0], *sorted(words, key=_is_option_or_its_value)]
            hydra.main(version_base="1.3", config_path=str(settings.CONF), config_name="config")(collect)()
        return configs
    except UserError:
        raise
    except Exception as error:  # Hydra checks few of its own settings
        hydra_words = [word for word in typed if word.lstrip("+~").startswith("hydra.")]
        if not hydra_words:
            if isinstance(error, ValueError):  # options that exclude each other, such as -m and --cfg
                raise UserError(str(error)) from error
            with plain_disk_errors(Path()):  # of the folder of a multirun, which Hydra makes
                raise
        raise UserError(f"Hydra cannot use {', '.join(hydra_words)} ({error!r}): give it another value.") from error
    finally:
        sys.argv = typed


def _is_option_or_its_value(word: str) -> bool:
    return word.startswith("-") or "=" not in word


def init(folder: Path) -> None:
    """Make a user's folder from the template, with a file of problems."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a new folder, or an empty one.")
    lines = []
    for problem in problems("chain", 40):
        row = {"id": problem.id, "problem": problem.question, "answer": problem.answer}
        lines.append(f"{json.dumps(row)}\n")
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for path in [folder, *folder.rglob("*")]:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)  # a package may be read-only
        (folder / "problems.jsonl").write_text("".join(lines))
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}): name another folder.") from error
    enter = f"cd {shlex.quote(str(folder))}"
    print(
        f"made {folder}; next:\n  {enter}\n  kvsweep policy check spread    # after each change of my_policies.py\n"
        "  kvsweep -m experiment=mine\n  kvsweep report results/runs/mine"
    )
