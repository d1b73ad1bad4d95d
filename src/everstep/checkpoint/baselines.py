"""The named rules that objectives are compared with, behind the same interface.

Each as its authors give it, faults included: none of them is ours to improve. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from everstep.checkpoint.outlook import LEAST_STALL_S
from everstep.checkpoint.policy import Situation
from everstep.core.errors import ConfigError

_COCI_POINTS = 32
_SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class EverySteps:
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError("EverySteps.steps", self.steps, "must be at least 1")

    def is_due(self, situation: Situation) -> bool:
        return situation.steps_since >= self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError("EverySeconds.seconds", self.seconds, "must be more than 0")

    def is_due(self, situation: Situation) -> bool:
        return situation.steps_since >= 1 and situation.seconds_since >= self.seconds


@dataclass(frozen=True, slots=True)
class PerEpoch:
    """After every pass over the data."""

    def is_due(self, situation: Situation) -> bool:
        if situation.loader_length is None:
            rule = "needs a data loader with a length; use EverySteps(n) for one without"
            raise ConfigError("policy", "PerEpoch()", rule)
        return situation.step % situation.loader_length == 0


@dataclass(frozen=True, slots=True)
class YoungDaly:
    """Every sqrt(2 stall / failure rate) seconds (Young 1974, Daly 2006)."""

    def is_due(self, situation: Situation) -> bool:
        stall_s = max(situation.costs.stall_s, LEAST_STALL_S)
        if situation.steps_since < 1 or situation.failure_rate <= 0:
            return False
        return situation.seconds_since >= math.sqrt(2 * stall_s / situation.failure_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFreq:
    """As often as the last one is on disk and stalls stay within a budget (FAST '21).

    Starts with `ceil((time to durable - stall) / step)` steps and adds 2 as long as the measured
    overhead is above the budget; here at once what it ends with. Saves after each pass over the
    data, too. How often anything fails is no part of it.
    """

    budget: float = 0.035

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ConfigError("CheckFreq.budget", self.budget, "must be above 0 and up to 1")

    def is_due(self, situation: Situation) -> bool:
        length = situation.loader_length
        is_pass_over = length is not None and situation.step % length == 0
        return is_pass_over or situation.steps_since >= self.interval_steps(situation)

    def interval_steps(self, situation: Situation) -> int:
        costs = situation.costs
        first = max(1, math.ceil((costs.durable_s - costs.stall_s) / costs.step_s))
        least = costs.stall_s / (self.budget * costs.step_s)
        return first + 2 * max(0, math.ceil((least - first) / 2 - 1e-9))


@dataclass(frozen=True, slots=True)
class CociPublished:
    """After each equal drop of the loss, by the formula in COCI's released code.

    P = (1 - exp(theta n stall)) (1 / (2 rate) - 1 / (2 theta)) for L = exp(theta t + theta2), time
    in minutes and the loss as a share of its first value. The formula is not invariant to units and
    does not minimise its own objective; it is kept as it was published.
    """

    def is_due(self, situation: Situation) -> bool:
        curve = situation.curve
        if curve is None or situation.steps_since < 1 or situation.failure_rate <= 0:
            return False
        steps = np.linspace(
            curve.first_step, max(situation.step, curve.first_step + 1), _COCI_POINTS
        )
        losses = curve.losses(steps)
        if not losses.min() > 0:
            return False
        minutes = steps * situation.costs.step_s / _SECONDS_PER_MINUTE
        theta = float(np.polyfit(minutes - minutes[0], np.log(losses / losses[0]), 1)[0])
        stall = max(1, situation.workers) * situation.costs.stall_s / _SECONDS_PER_MINUTE
        rate = situation.failure_rate * _SECONDS_PER_MINUTE
        if theta >= 0:
            return False
        drop = (1 - math.exp(theta * stall)) * (1 / (2 * rate) - 1 / (2 * theta))
        since = curve.loss(situation.step - situation.steps_since) - curve.loss(situation.step)
        return since / float(losses[0]) >= drop


coci_published = CociPublished()
