"""Many generated traces: the mean of each system's throughput with its 95 % interval. Pure.

Systems see the same traces, so ratios to the first system are taken trace by trace: their interval
is narrower than those of the throughputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.sim.results import Outcome

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_STUDENT = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23),
    *(2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09),
    *(2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)
_NORMAL = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half_width:.3f}"

    def as_percent(self) -> str:
        return f"{self.mean:.2%} ± {self.half_width:.2%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    system: str
    throughput: Interval
    useful_fraction: Interval
    steps_lost: Interval
    ratio: Interval
    """Of the first system's throughput to this one's, over the traces where this one got on."""


def interval(values: Sequence[float]) -> Interval:
    mean = sum(values) / len(values) if values else math.nan
    if len(values) < 2:
        return Interval(mean=mean, half_width=math.inf)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    freedom = len(values) - 1
    quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL
    return Interval(mean=mean, half_width=quantile * math.sqrt(variance / len(values)))


def over_seeds(
    simulate_seed: Callable[[int], Sequence[Outcome]], *, first_seed: int, runs: int
) -> list[Confidence]:
    """Runs `runs` seeds from the first on."""
    outcomes = [simulate_seed(seed) for seed in range(first_seed, first_seed + runs)]
    return [
        _confidence([run[place] for run in outcomes], [run[0] for run in outcomes])
        for place in range(len(outcomes[0]))
    ]


def _confidence(own: Sequence[Outcome], first: Sequence[Outcome]) -> Confidence:
    ratios = [
        one.throughput / other.throughput
        for one, other in zip(first, own, strict=True)
        if other.throughput > 0
    ]
    return Confidence(
        system=own[0].system,
        throughput=interval([outcome.throughput for outcome in own]),
        useful_fraction=interval([outcome.useful_fraction for outcome in own]),
        steps_lost=interval([outcome.steps_lost for outcome in own]),
        ratio=interval(ratios),
    )
