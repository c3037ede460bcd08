"""The console script `kvsweep`. What only shows the configuration, such as Tab completion, does not wait for torch."""

import os
import sys

import hydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from harness.paths import CONF

SHOWS = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "--version"}


def main() -> None:
    """Exit codes as `harness.run.main`, which does everything else."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        if not _show():
            from harness.run import main as run

            run()
    except BrokenPipeError:
        # Whoever read what this prints has seen enough; the interpreter must not write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _show() -> bool:
    """Show what Hydra is asked to show; False if it is asked for something else, or made a mistake in asking."""
    if SHOWS.isdisjoint(argument.partition("=")[0] for argument in sys.argv[1:]):
        return False
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda config: None)()
        sys.stdout.flush()
        return True
    except (HydraException, OmegaConfBaseException):
        return False  # said in one sentence by the rest
    except ValueError as error:  # options that exclude each other, such as -m and --cfg
        print(f"kvsweep: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
