"""Policies that minimise something: each gives its prices, one solver places the checkpoints.

| objective       | price of a checkpoint | lost with a failure     | so checkpoints are       |
|-----------------|-----------------------|-------------------------|--------------------------|
| WallClock       | stall                 | seconds                 | even (Young and Daly)    |
| GpuHours        | stall x workers       | seconds x workers       | denser with more workers |
| LostProgress    | stall x mean progress | the loss gained since   | denser where it falls    |
| BestModelAtStop | stall x progress then | so, and when stopped    | mildly denser there      |

`LostProgress()` is the default for exploratory training: COCI's idea, under CheckFreq's budget. It
prices a stall at what an average second gains, because a stall delays the job by the same time
wherever it is; pricing it at what that very second would have gained makes even placement the best
again. Without a curve it is Young and Daly's rule under a budget. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from everstep.checkpoint.budget import Budget, ShareOfTime
from everstep.checkpoint.curve_fit import Floats
from everstep.checkpoint.outlook import Outlook, Workers, check_workers, look_ahead
from everstep.checkpoint.placement import Prices, Risk, benefit, number_taken
from everstep.checkpoint.policy import Policy, Situation
from everstep.core.errors import ConfigError

CHECKFREQ_BUDGET = 0.035
"""The share of time that CheckFreq (FAST '21) lets checkpoints take."""


class Objective(Policy, Protocol):
    def prices(self, outlook: Outlook) -> Prices: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WallClock:
    """The shortest time to the end."""

    workers: Workers | None = None
    """The schedule of workers, if known: more of them fail more often. Default: as seen."""

    def __post_init__(self) -> None:
        check_workers("WallClock.workers", self.workers)

    def prices(self, outlook: Outlook) -> Prices:
        ones = np.ones_like(outlook.seconds)
        return Prices(
            seconds=outlook.seconds,
            checkpoint=outlook.stall_s * ones,
            risks=(Risk(outlook.failure_rate, ones),),
        )

    def is_due(self, situation: Situation) -> bool:
        return _is_due(self, situation, look_ahead(situation, workers=self.workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHours:
    """The least time of all workers together, when their number changes."""

    workers: Workers | None = None

    def __post_init__(self) -> None:
        check_workers("GpuHours.workers", self.workers)

    def prices(self, outlook: Outlook) -> Prices:
        return Prices(
            seconds=outlook.seconds,
            checkpoint=outlook.stall_s * outlook.workers,
            risks=(Risk(outlook.failure_rate, outlook.workers),),
        )

    def is_due(self, situation: Situation) -> bool:
        return _is_due(self, situation, look_ahead(situation, workers=self.workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class LostProgress:
    """The least loss gained in vain, within a budget that is never passed."""

    budget: float | Budget = CHECKFREQ_BUDGET
    """A share of time; or `NumberOfCheckpoints(n)` or `BytesWritten(n)`. Of a job with known end
    the whole length counts, and most may be spent early; else only the time so far."""

    hazard: float = 0.0
    """How often per second such jobs are stopped early: late stages are then seldom reached."""

    workers: Workers | None = None

    def __post_init__(self) -> None:
        _check_hazard("LostProgress.hazard", self.hazard)
        check_workers("LostProgress.workers", self.workers)
        self._budget()  # its own checks

    def _budget(self) -> Budget:
        return ShareOfTime(self.budget) if isinstance(self.budget, int | float) else self.budget

    def prices(self, outlook: Outlook) -> Prices:
        survival = outlook.survival(self.hazard)
        return Prices(
            seconds=outlook.seconds,
            checkpoint=survival * outlook.stall_s * outlook.mean_progress,
            risks=(Risk(survival * outlook.failure_rate, outlook.progress),),
        )

    def most(self, situation: Situation, outlook: Outlook) -> int:
        """How many checkpoints the budget allows in all of `outlook`; for planning a whole job."""
        allowed = self._budget().left(situation, job_s=float(outlook.seconds.sum()))
        return max(0, int(allowed + 1e-9))

    def is_due(self, situation: Situation) -> bool:
        outlook = look_ahead(situation, workers=self.workers)
        if not _is_due(self, situation, outlook):
            return False
        budget = self._budget()
        so_far_s = situation.seconds
        job_s = max(so_far_s - situation.spent_s, 0.0) + float(outlook.seconds[1:].sum())
        is_end_known = situation.total_steps is not None
        if budget.left(situation, job_s=job_s if is_end_known else so_far_s) < 1:
            return False
        # What is left is spread over the rest of the job by one charge for every checkpoint, so
        # this one is due if the highest charge that it bears makes few enough of them.
        prices = self.prices(outlook)
        charge = benefit(prices, step_s=situation.costs.step_s)
        return number_taken(prices, charge=charge) <= budget.left(situation, job_s=job_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestModelAtStop:
    """The best model in the last checkpoint when the job is stopped without notice."""

    hazard: float
    """How often per second such jobs are stopped: 1 / (their mean length in seconds)."""

    workers: Workers | None = None

    def __post_init__(self) -> None:
        _check_hazard("BestModelAtStop.hazard", self.hazard)
        check_workers("BestModelAtStop.workers", self.workers)

    def prices(self, outlook: Outlook) -> Prices:
        survival = outlook.survival(self.hazard)
        at_stop = _progress_at_stop(outlook, self.hazard)
        stopped = np.full_like(survival, self.hazard)
        return Prices(
            seconds=outlook.seconds,
            checkpoint=survival * outlook.stall_s * at_stop,
            risks=(
                Risk(survival * outlook.failure_rate * at_stop, np.ones_like(survival)),
                Risk(survival * stopped, outlook.progress),
            ),
        )

    def is_due(self, situation: Situation) -> bool:
        return _is_due(self, situation, look_ahead(situation, workers=self.workers))


def _is_due(objective: Objective, situation: Situation, outlook: Outlook) -> bool:
    """Not before the last one is durable: a second would only wait for it."""
    if situation.steps_since < 1 or situation.seconds_since < situation.costs.durable_s:
        return False
    return benefit(objective.prices(outlook), step_s=situation.costs.step_s) >= 0


def _progress_at_stop(outlook: Outlook, hazard: float) -> Floats:
    """What a second of delay costs in the end: the progress expected at the moment of the stop."""
    progress = outlook.progress
    at_stop = np.empty_like(progress)
    later = float(progress[-1])
    for index in range(len(progress) - 1, -1, -1):
        stays = float(np.exp(-hazard * outlook.seconds[index]))
        later = (1 - stays) * float(progress[index]) + stays * later
        at_stop[index] = later
    return at_stop


def _check_hazard(field: str, hazard: float) -> None:
    if not 0 <= hazard < float("inf"):
        raise ConfigError(field, hazard, "must be stops per second, 0 or more")
