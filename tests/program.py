"""The program's commands as functions of their words: `report(["DIR"])` is `kvsweep report DIR` in this process."""

from collections.abc import Callable, Sequence

from kvsweep.cli import main


def command(name: str) -> Callable[[Sequence[str]], None]:
    return lambda words: main([name, *words])


report, status, grade, compare, export, replay, predictor, trace = map(
    command, ("report", "status", "grade", "compare", "export", "replay", "predictor", "trace")
)
