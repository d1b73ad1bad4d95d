"""What a user says about logging: how much, where to, and who helps to replay it.

Checked when it is made, before any worker starts. Which boundaries are logged is no setting: it
follows from the budget and from what is measured (`grouping`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everstep.core.errors import ConfigError
from everstep.core.sizes import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """`Job(log=everstep.Logging(budget="20GB"))`: what passes between stages is kept, so that a
    stage that lost its last worker is rebuilt without taking the others back."""

    budget: str | int = "20GB"
    """Most bytes of all workers' logs together. Less makes larger groups of stages, which are
    replayed together; with 0 nothing is logged."""

    directory: str | Path | None = None
    """On each worker's own disk. Default: beside the checkpoints."""

    helpers: int | None = None
    """Most workers that help to replay. Default: all that are idle. With 0 the replay is exact to
    the bit; with more, gradients are summed in another order."""

    memory: str | int = "256MB"
    """Of each worker, for what is not yet on its disk: how far a slow disk may fall behind."""

    with_replicas: bool = False
    """Log even when stages have several workers, of which one is usually left to copy from."""

    def __post_init__(self) -> None:
        parse_bytes(self.budget, field="Logging.budget")
        if parse_bytes(self.memory, field="Logging.memory") == 0:
            raise ConfigError("Logging.memory", self.memory, "must be more than 0 bytes")
        if self.directory is not None:
            _check_directory(self.directory)
        if self.helpers is not None:
            _check_helpers(self.helpers)

    @property
    def budget_bytes(self) -> int:
        return parse_bytes(self.budget, field="Logging.budget")

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory, field="Logging.memory")


def _check_directory(directory: str | Path) -> None:
    if not isinstance(directory, str | Path):
        raise ConfigError("Logging.directory", directory, "must be a path")
    if not str(directory).strip():
        raise ConfigError("Logging.directory", "empty", "must be a path, or None for the default")
    if "://" in str(directory):
        rule = "must be on the worker's own disk: a remote store cannot keep up with a step"
        raise ConfigError("Logging.directory", directory, rule)


def _check_helpers(helpers: int) -> None:
    if isinstance(helpers, bool) or not isinstance(helpers, int) or helpers < 0:
        rule = "must be a whole number of workers, 0 or more, or None for all idle ones"
        raise ConfigError("Logging.helpers", helpers, rule)
