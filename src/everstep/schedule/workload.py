"""A problem as flat integer arrays, for the code that tries thousands of timetables.

Operation `(job * stages + stage) * 3 + kind` is F (0), B (1) or W (2) of one micro-batch on one
stage; `job = replica * microbatches + microbatch`. Times are whole ticks, so that sums are exact
and equal times compare equal; `units` converts back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from everstep.schedule.problem import Problem
from everstep.schedule.routing import Routes

F, B, W = 0, 1, 2

NO_LIMIT = 1 << 30
"""Stands for "no in-flight limit": more micro-batches than any problem has."""

_FINEST = 1_000_000
"""Ticks of the longest duration when no coarser tick is exact: measured times round to 1e-6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    replicas: int
    stages: int
    microbatches: int
    num_live: tuple[int, ...]
    forward: tuple[int, ...]
    input_gradient: tuple[int, ...]
    weight_gradient: tuple[int, ...]
    transfer: int
    synchronization: int
    limit: tuple[int, ...]
    is_glued: bool
    is_staggered: bool
    tick: Fraction
    """The length of a tick in the unit of the durations."""

    def units(self, ticks: int) -> float:
        return self.in_units([ticks])[0]

    def in_units(self, times: Iterable[int]) -> list[float]:
        """Many at once: asking a fraction for its parts takes longer than the conversion."""
        numerator, denominator = self.tick.numerator, self.tick.denominator
        return [ticks * numerator / denominator for ticks in times]

    @property
    def num_jobs(self) -> int:
        return self.replicas * self.microbatches

    @property
    def largest_load(self) -> tuple[int, ...]:
        """Per stage, the micro-batches of its busiest worker when they are spread evenly."""
        return tuple(-(-self.num_jobs // live) for live in self.num_live)

    def gradient_delay(self, stage: int) -> int:
        """From the start of B on a stage until the input gradient may leave."""
        glued = self.weight_gradient[stage] if self.is_glued else 0
        return self.input_gradient[stage] + glued


def workload(problem: Problem) -> Workload:
    durations = problem.durations
    kinds = [(s.forward, s.input_gradient, s.weight_gradient) for s in durations.stages]
    loose = [durations.transfer, durations.synchronization]
    tick = _common_tick([value for kind in kinds for value in kind] + loose, durations.longest)
    in_ticks = [[round(value / tick) for value in kind] for kind in kinds]
    return Workload(
        replicas=problem.replicas,
        stages=problem.stages,
        microbatches=problem.microbatches,
        num_live=tuple(len(problem.live(stage)) for stage in range(problem.stages)),
        forward=tuple(kind[F] for kind in in_ticks),
        input_gradient=tuple(kind[B] for kind in in_ticks),
        weight_gradient=tuple(kind[W] for kind in in_ticks),
        transfer=round(durations.transfer / tick),
        synchronization=round(durations.synchronization / tick),
        limit=tuple(problem.limit(stage) or NO_LIMIT for stage in range(problem.stages)),
        is_glued=problem.variant.is_glued,
        is_staggered=problem.variant.is_staggered,
        tick=tick,
    )


def _common_tick(values: list[float], longest_value: float) -> Fraction:
    """The largest tick that all values are multiples of, or a millionth of the largest value."""
    longest = Fraction(longest_value)
    exact = [Fraction(value).limit_denominator(10_000) for value in values]
    if any(float(approx) != value for approx, value in zip(exact, values, strict=True)):
        return longest / _FINEST
    tick = Fraction(0)
    for value in exact:
        tick = _gcd(tick, value)
    return tick if longest / tick <= _FINEST else longest / _FINEST


def _gcd(a: Fraction, b: Fraction) -> Fraction:
    while b:
        a, b = b, a % b
    return a


@dataclass(frozen=True, slots=True)
class Timetable:
    """Who runs each operation, and when it starts."""

    routes: Routes
    starts: list[int]
    order: list[int]
    """All operations; those of one worker stand in the order it runs them. Start times alone do
    not tell, because an operation may take no time."""


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """Smaller is better. Ties in the period are broken towards less time spent on every stage."""

    period: int
    num_critical: int
    total: int


def stage_windows(work: Workload, starts: list[int]) -> list[tuple[int, int]]:
    """Per stage, from its first F to the end of its optimizer step."""
    windows = []
    stride = work.stages * 3
    for stage in range(work.stages):
        first = min(starts[stage * 3 :: stride])
        last = max(starts[stage * 3 + W :: stride]) + work.weight_gradient[stage]
        windows.append((first, last + work.synchronization))
    return windows


def makespan(work: Workload, starts: list[int]) -> int:
    return max(end for _, end in stage_windows(work, starts))


def score(work: Workload, starts: list[int]) -> Score:
    """The period of the timetable: the time between the same moment of two consecutive steps.

    Staggered, a stage starts its next step as soon as its own window is over, so the widest
    window counts; synchronous, everyone waits for the last.
    """
    windows = stage_windows(work, starts)
    spans = [end - first for first, end in windows]
    if not work.is_staggered:
        spans = [end for _, end in windows]
    period = max(spans)
    return Score(period, spans.count(period), sum(spans))
