"""The console script `kvsweep`: compose, check everything, launch; `kvsweep init` makes a folder of one's own."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from kvsweep.base.command_line import GOES_ON, one_sentence
from kvsweep.base.errors import UserError
from kvsweep.base.records import read_cells
from kvsweep.harness.replay.command import ReplayPlan, launch_replayed
from kvsweep.harness.settings import CONF, build, build_target, own_overrides, plain_config_errors
from kvsweep.harness.sweep.launch.inline import Inline
from kvsweep.harness.sweep.launch.launcher import Launcher, launch, split
from kvsweep.harness.sweep.plan.estimate import describe
from kvsweep.harness.sweep.plan.job import Job, make_job
from kvsweep.harness.toy.tasks import problems

TEMPLATE = Path(__file__).resolve().parents[1] / "template"
# A command that names none of these runs the default policy, and beside it the full cache to compare with.
_NAMES_CELLS = ("policy", "grid", "experiment")
SHOWS = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "--version"}


@one_sentence("kvsweep", GOES_ON)
def main() -> None:
    """Console script: exit code 0 done, 1 a job failed, 2 bad input, 3 locked by another process, 130 interrupted."""
    if sys.argv[1:2] == ["init"]:
        init(sys.argv[2:])
        return
    # Without this Hydra prints its own errors and exits with code 1.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # Every press of kvpress has arguments of its own, which no YAML can list; ++ lets Hydra take any.
    sys.argv = [f"++{word}" if word.startswith("policy.press_args.") else word for word in sys.argv]
    if not SHOWS.isdisjoint(argument.partition("=")[0] for argument in sys.argv[1:]):
        try:
            _compose(lambda config: None)
        except ValueError as error:  # options that exclude each other, such as -m and --cfg
            raise UserError(str(error)) from error
        return
    # Hydra would refuse an option that is not its own.
    dry_run = "--dry-run" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--dry-run"]
    jobs, launcher, plan = collect_jobs()
    if not jobs:  # Hydra only printed something, as for -cjob
        return
    if dry_run:
        print(describe([job for task in split(jobs, launcher) for job in task]))
        if any(job.rounds and not job.finish for job in jobs):
            print("With until=decided this is the most that can come: a decided cell gets no more draws.")
    elif plan.wanted:
        launch_replayed(jobs, launcher, plan)
    else:
        launch(jobs, launcher)


def collect_jobs() -> tuple[list[Job], Launcher, ReplayPlan]:
    """Compose and check every job of the command line before any of them runs."""
    found: list[tuple[Job, Launcher, ReplayPlan]] = []
    mistakes: list[UserError] = []

    def collect(config: DictConfig) -> None:
        # Hydra prints lines of its own about an error that passes through it.
        try:
            with plain_config_errors():
                if not any(word.lstrip("+~").startswith(_NAMES_CELLS) for word in HydraConfig.get().overrides.task):
                    config.grid.policy = ["full", config.policy.name]
                launcher = build_target("launcher", config.launcher)
                plan = build(ReplayPlan, "replay", {name: config.get(name) for name in ("replay", "screen", "texts")})
                found.append((make_job(config), launcher, plan))
        except UserError as mistake:
            mistakes.append(mistake)

    _compose(collect)
    if mistakes:
        raise mistakes[0]
    if not found:
        return [], Inline(), ReplayPlan()
    jobs, launchers, plans = zip(*found, strict=True)
    if any(launcher != launchers[0] for launcher in launchers):
        raise UserError("launcher differs between the jobs of one command: give it one value, not a list.")
    if any(plan != plans[0] for plan in plans):
        raise UserError("replay, screen and texts differ between the jobs of one command: give each one value.")
    for directory in {job.run_directory for job in jobs}:
        for _ in read_cells(directory):  # refuses those of another schema
            pass
    return list(jobs), launchers[0], plans[0]


def _compose(collect: Callable[[DictConfig], None]) -> None:
    if not any(argument.startswith("hydra.searchpath=") for argument in sys.argv):
        sys.argv += own_overrides()
    with plain_config_errors():
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(collect)()
        except (HydraException, BrokenPipeError):  # some of Hydra's errors are an OSError as well
            raise
        except OSError as error:
            reason = f"results_dir cannot be written to ({error.strerror})"
            raise UserError(f"{reason}: set results_dir= elsewhere.") from error


def init(arguments: Sequence[str]) -> None:
    about = "A folder of your own: a policy, problems and a sweep to change, and conf/ for more of them."
    parser = argparse.ArgumentParser(prog="kvsweep init", description=about)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    folder: Path = parser.parse_args(arguments).folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a new folder, or an empty one.")
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        rows = ({"id": p.id, "problem": p.question, "answer": p.answer} for p in problems("chain", 40))
        (folder / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error.strerror}): name another folder.") from error
    print(f"made {folder}; next:\n  cd {folder}\n  kvsweep -m experiment=mine\n  kvsweep-report results/runs/mine")


if __name__ == "__main__":
    main()
