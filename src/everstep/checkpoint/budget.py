"""How many checkpoints a job may still take: by share of its time, by number, by bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from everstep.checkpoint.outlook import LEAST_STALL_S
from everstep.checkpoint.policy import Situation
from everstep.core.errors import ConfigError


class Budget(Protocol):
    def left(self, situation: Situation, *, job_s: float) -> float:
        """Checkpoints that may still be taken in a job of `job_s` seconds; may be negative."""
        ...


@dataclass(frozen=True, slots=True)
class ShareOfTime:
    """Stalls take at most this share of the job's time."""

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError("budget", self.share, "must be a share of time, above 0 and up to 1")

    def left(self, situation: Situation, *, job_s: float) -> float:
        stall_s = max(situation.costs.stall_s, LEAST_STALL_S)
        return (self.share * job_s - situation.spent_s) / stall_s


@dataclass(frozen=True, slots=True)
class NumberOfCheckpoints:
    """At most so many in the whole job."""

    number: int

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ConfigError("budget", self.number, "must be at least 1 checkpoint")

    def left(self, situation: Situation, *, job_s: float) -> float:  # noqa: ARG002
        return float(self.number - situation.num_taken)


@dataclass(frozen=True, slots=True)
class BytesWritten:
    """At most so many bytes of checkpoints in the whole job."""

    size_bytes: int

    def __post_init__(self) -> None:
        if self.size_bytes < 1:
            raise ConfigError("budget", self.size_bytes, "must be at least 1 byte")

    def left(self, situation: Situation, *, job_s: float) -> float:  # noqa: ARG002
        each = max(1, situation.costs.size_bytes)
        return float(self.size_bytes // each - situation.num_taken)
