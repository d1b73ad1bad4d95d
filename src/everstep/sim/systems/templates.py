"""Pipelines of other lengths for the same model: how long 1F1B takes on n workers. [pure]

Layers are cut anew for each length, so a length that does not divide them has a slowest stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from everstep.schedule.durations import Durations
from everstep.sim.job import Job, in_flight_in
from everstep.sim.periods import one_f_one_b_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """m micro-batches take `fixed_s + m * each_s`: 1F1B goes at the pace of its slowest stage."""

    num_workers: int
    fixed_s: float
    each_s: float
    stage_bytes: float
    """Of the largest stage, on one device."""

    def step_s(self, microbatches: int) -> float:
        return self.fixed_s + microbatches * self.each_s

    def most_within(self, step_s: float) -> int:
        return max(0, int((step_s - self.fixed_s) / self.each_s + 1e-9))


class Templates:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.most_workers = len(job.layers)
        self.template = cache(self._make)

    def durations(self, num_workers: int) -> Durations:
        return replace(self._job, stages=num_workers, measured=None, limits=None).durations()

    def fits(self, num_workers: int) -> bool:
        """The state and as many micro-batches as 1F1B holds."""
        slices = replace(self._job, stages=num_workers, measured=None).slices()
        return all(
            in_flight_in(layers, self._job.device_bytes)
            >= min(num_workers - stage, self._job.microbatches)
            for stage, layers in enumerate(slices)
        )

    @property
    def fewest_workers(self) -> int | None:
        """That hold the model; None when not even one layer each does."""
        return next((n for n in range(1, self.most_workers + 1) if self.fits(n)), None)

    def _make(self, num_workers: int) -> Template:
        is_own = num_workers == self._job.stages
        durations = self._job.durations() if is_own else self.durations(num_workers)
        microbatches = self._job.microbatches
        each_s = max(stage.total for stage in durations.stages)
        job = replace(self._job, stages=num_workers, measured=None, limits=None)
        return Template(
            num_workers=num_workers,
            fixed_s=one_f_one_b_s(durations, microbatches) - microbatches * each_s,
            each_s=each_s,
            stage_bytes=max(job.stage_state_bytes()),
        )
