"""Where the time of a step goes: a stopwatch per kind of thing, and the profile it gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from everstep.core.clock import Clock

FORWARD = "forward"
INPUT_GRADIENT = "input_gradient"
WEIGHT_GRADIENT = "weight_gradient"
REDUCTION = "reduction"
OPTIMIZER = "optimizer"
PEERS = "peers"
"""Blocked in a receive: waiting for a peer's work, or for the wire."""
DATA = "data"
"""Blocked in the fetcher: what a slow dataset costs."""
WATERMARK = "watermark"


class StepTimes:
    """Seconds by kind, of one step. Time inside another kind's block counts for both."""

    def __init__(self, clock: Clock, *, settle: Callable[[], None] | None = None) -> None:
        """`settle` returns when all that was begun is done: a device runs on by itself."""
        self._clock = clock
        self._settle = settle
        self._began_s = clock.now_s()
        self.samples: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        began_s = self._clock.now_s()
        try:
            yield
            if self._settle is not None:
                self._settle()
        finally:
            self.samples[kind].append(self._clock.now_s() - began_s)

    @property
    def elapsed_s(self) -> float:
        return self._clock.now_s() - self._began_s

    def totals(self) -> dict[str, float]:
        return {kind: sum(seconds) for kind, seconds in self.samples.items()}


class Profiler:
    """Gathers the times of some steps into one number per kind.

    The first step is left out: it pays for allocations, caches and first touches.
    """

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def add(self, times: StepTimes) -> None:
        self._steps.append(times)

    def typical_s(self, kind: str) -> float:
        samples = self._samples(kind)
        return median(samples) if samples else 0.0

    def shortest_s(self, kind: str) -> float:
        return min(self._samples(kind), default=0.0)

    def _samples(self, kind: str) -> list[float]:
        counted = self._steps[1:] or self._steps
        return [seconds for times in counted for seconds in times.samples.get(kind, ())]
