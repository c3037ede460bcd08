"""The program's commands as functions of their words: `report(["DIR"])` is `kvsweep report DIR` in this process."""

from collections.abc import Callable, Sequence

from kvsweep.cli import main


def command(name: str) -> Callable[[Sequence[str]], None]:
    return lambda words: main([name, *words])


report, status, grade, compare, export, replay, predictor, trace = map(
    command, ("report", "status", "grade", "compare", "export", "replay", "predictor", "trace")
)


def beside(policy: list[str], words: list[str]) -> list[str]:
    """The policy's overrides but those whose values a grid among the words gives: to give both is refused."""
    given = {word.partition("=")[0] for word in words}
    return [one for one in policy if one.replace("policy.", "grid.").partition("=")[0] not in given]
