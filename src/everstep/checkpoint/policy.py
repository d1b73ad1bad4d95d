"""When to take a checkpoint: what a policy may look at, and the one question it answers.

Policies are values without state: the same situation gives the same answer on every rank, in a
simulation and in a live job. Those that minimise something are in `objectives`, the named rules
they are compared with in `baselines`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everstep.checkpoint.curve_fit import Curve
from everstep.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured of steps and checkpoints so far."""

    step_s: float
    """One step without a checkpoint."""

    stall_s: float
    """What a checkpoint keeps the training thread waiting. Not the copy and not the disk."""

    durable_s: float = 0.0
    """From the start of a checkpoint until it survives a crash."""

    restore_s: float = 0.0
    """From a failure to the first new step, without the steps that are run again."""

    size_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise ConfigError("costs.step_s", self.step_s, "must be more than 0 seconds")
        for name in ("stall_s", "durable_s", "restore_s", "size_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"costs.{name}", getattr(self, name), "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All a policy may look at, after a step. Only the past is in it."""

    step: int
    """Steps finished, counted over the whole job."""

    steps_since: int
    """Of these, after the last checkpoint, or since the job began."""

    seconds: float
    """Training so far, checkpoints and steps that were run again included."""

    seconds_since: float

    costs: Costs

    failure_rate: float
    """Failures per second, of all workers together, that force training back to a checkpoint.
    Those that live workers, replicas or logs make good are not among them."""

    total_steps: int | None = None
    workers: int = 1
    curve: Curve | None = None
    spent_s: float = 0.0
    """Stall of all checkpoints so far."""

    num_taken: int = 0
    loader_length: int | None = None
    """Steps of one pass over the data."""


class Policy(Protocol):
    def is_due(self, situation: Situation) -> bool:
        """Whether to take a checkpoint now. Asked after every step."""
        ...
