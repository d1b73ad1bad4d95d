"""How often failures force training back to a checkpoint: a prior, and what was seen since.

Counted per second of one worker and scaled by their number. Nobody knows the order of magnitude
beforehand (a good cluster and cheap machines that are taken away differ by a thousand), so the
prior is wide in the logarithm of the rate, and a few failures outweigh it. The estimate is the
centre of the posterior in the logarithm, because the best interval goes with its root. Only
failures that force a rollback count; those that are made good otherwise add time but no failure.
Kept beside the checkpoints as plain JSON. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from everstep.core.errors import ConfigError

PRIOR_WORKER_HOURS = 5e4
"""Hours of one GPU between two interruptions, when nothing is known."""

PRIOR_DECADES = 1.0
"""Standard deviation of the prior, in factors of ten."""

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRate:
    """A value: `seen` gives the next one."""

    failures: int = 0
    worker_seconds: float = 0.0
    """Time of all workers together in which they could have failed."""

    prior_worker_hours: float = PRIOR_WORKER_HOURS

    def __post_init__(self) -> None:
        if self.failures < 0:
            raise ConfigError("failures", self.failures, "must not be negative")
        if not 0 <= self.worker_seconds < math.inf:
            raise ConfigError("worker_seconds", self.worker_seconds, "must be 0 or more")
        if not 0 < self.prior_worker_hours < math.inf:
            raise ConfigError("prior_worker_hours", self.prior_worker_hours, "must be above 0")

    def per_second(self, workers: int = 1) -> float:
        """Of so many workers together."""
        centre = -math.log(3600 * self.prior_worker_hours)
        spread = PRIOR_DECADES * math.log(10)
        log_rate = np.linspace(centre - 8 * spread, centre + 8 * spread, 801)
        weight = (
            -0.5 * ((log_rate - centre) / spread) ** 2
            + self.failures * log_rate
            - np.exp(log_rate) * self.worker_seconds
        )
        chance = np.exp(weight - weight.max())
        return workers * math.exp(float(chance @ log_rate / chance.sum()))

    def seen(self, *, seconds: float, workers: int = 1, failures: int = 0) -> FailureRate:
        """After so many more seconds of training, and failures that forced a rollback."""
        return replace(
            self,
            failures=self.failures + failures,
            worker_seconds=self.worker_seconds + seconds * workers,
        )

    def to_json(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "failures": self.failures,
            "worker_seconds": self.worker_seconds,
            "prior_worker_hours": self.prior_worker_hours,
        }

    @staticmethod
    def from_json(document: Mapping[str, object]) -> FailureRate:
        if document.get("format") != _FORMAT:
            raise ConfigError("failures.json format", document.get("format"), f"must be {_FORMAT}")
        failures, seconds = document.get("failures"), document.get("worker_seconds")
        prior = document.get("prior_worker_hours", PRIOR_WORKER_HOURS)
        if not isinstance(failures, int) or isinstance(failures, bool):
            raise ConfigError("failures.json failures", failures, "must be a whole number")
        for name, value in (("worker_seconds", seconds), ("prior_worker_hours", prior)):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ConfigError(f"failures.json {name}", value, "must be a number")
        assert isinstance(seconds, int | float)
        assert isinstance(prior, int | float)
        return FailureRate(
            failures=failures, worker_seconds=float(seconds), prior_worker_hours=float(prior)
        )
