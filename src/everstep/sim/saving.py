"""How often a system saves. The checkpoint policy answers one question here: after how many steps?

    Young/Daly   sqrt(2 c / rate) seconds, c the stall of one checkpoint (Young 1974, Daly 2006)
    CheckFreq    as often as the disk allows with a stall below a budget; never asks for the rate

Nobody saves before the last checkpoint is durable. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    step_s: float
    stall_s: float
    durable_s: float
    """From the start of a save until it is safe on disk."""

    load_s: float


class SavePolicy(Protocol):
    def interval_steps(self, costs: SaveCosts, *, failures_per_second: float) -> float:
        """Steps between two checkpoints; infinity for never."""


@dataclass(frozen=True, slots=True)
class YoungDaly:
    def interval_steps(self, costs: SaveCosts, *, failures_per_second: float) -> float:
        if failures_per_second <= 0:
            return math.inf
        best_s = math.sqrt(2 * costs.stall_s / failures_per_second)
        return math.ceil(max(best_s, costs.durable_s, costs.step_s) / costs.step_s)


@dataclass(frozen=True, slots=True)
class CheckFreq:
    overhead_fraction: float = 0.035
    """Its paper's budget for the stall."""

    def interval_steps(self, costs: SaveCosts, *, failures_per_second: float) -> float:  # noqa: ARG002
        frequent = math.ceil(max(costs.durable_s, costs.step_s) / costs.step_s)
        affordable = math.ceil(costs.stall_s / (self.overhead_fraction * costs.step_s))
        return max(1, frequent, affordable)


@dataclass(frozen=True, slots=True)
class EverySteps:
    steps: int

    def interval_steps(self, costs: SaveCosts, *, failures_per_second: float) -> float:  # noqa: ARG002
        return self.steps


class IsDue(Protocol):
    """A live policy, asked after every step (checkpoint/policy.py)."""

    def is_due(self, situation: Any) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A live policy in the simulator. As long as costs and rate stay, its answer changes once from
    no to yes as the steps since the last checkpoint grow; that step is searched for, not walked to.
    """

    policy: IsDue
    situation: Callable[[SaveCosts, float, int], Any]
    """From costs, failures per second and steps since the last checkpoint."""

    most_steps: int = 1 << 40
    """Not due by then is never."""

    def interval_steps(self, costs: SaveCosts, *, failures_per_second: float) -> float:
        def is_due(steps: int) -> bool:
            return self.policy.is_due(self.situation(costs, failures_per_second, steps))

        if not is_due(self.most_steps):
            return math.inf
        high = 1
        while not is_due(high):
            high = min(2 * high, self.most_steps)
        first_due = bisect_left(range(1, high + 1), 1, key=is_due) + 1
        frequent = math.ceil(costs.durable_s / costs.step_s)
        return max(first_due, frequent)


POLICIES: dict[str, SavePolicy] = {"young-daly": YoungDaly(), "checkfreq": CheckFreq()}


def policy_named(text: str) -> SavePolicy:
    """A name, or a number of steps."""
    if text in POLICIES:
        return POLICIES[text]
    if text.isdecimal() and int(text):
        return EverySteps(int(text))
    raise ConfigError("--policy", text, f"must be {', '.join(POLICIES)} or a number of steps")
