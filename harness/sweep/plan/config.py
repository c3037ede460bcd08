"""The settings of a job that belong to no other room."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from kvsweep.base.errors import UserError

Seconds = Annotated[float, Field(gt=0, description="a number of seconds")]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The report's settings that a sequential sweep needs: a setting holds if it costs fewer points than `margin`."""

    margin: Annotated[float, Field(gt=0, lt=100, description="a number of points")] = 5.0


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """The tracker of a job; `conf/tracker/wandb.yaml` describes each field. A missing package raises a UserError."""

    kind: Literal["none", "wandb", "trackio", "mlflow"] = "none"
    project: str = "kvsweep"
    interval_s: Seconds = 15.0
    patience_s: Seconds = 20.0

    def __post_init__(self) -> None:
        if self.kind != "none" and find_spec(self.kind) is None:
            missing = f"tracker={self.kind} needs the package {self.kind}, which is not installed"
            raise UserError(f"{missing}: pip install 'kvsweep[{self.kind}]', or tracker=none.")


UNTRACKED = TrackerConfig()
