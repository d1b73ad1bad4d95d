"""What lies ahead of a job, as consecutive stretches of training: their length, gain and danger.

Made either from a situation, with the fitted curve (for use online), or from a whole recorded run
(for planning and comparing). Without a curve every second gains the same, so that whatever is
placed by gain falls back to even placement. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

from everstep.checkpoint.curve_fit import Floats
from everstep.checkpoint.policy import Situation
from everstep.core.errors import ConfigError

Workers: TypeAlias = int | tuple[tuple[int, int], ...]
"""A number, or a schedule: ((first step, workers), ...), the first of them from step 0."""

LEAST_STALL_S = 1e-3
"""A checkpoint that seems free still uses the disk: none is thought cheaper than this."""

LEAST_GAIN_FRACTION = 0.05
"""However flat the curve, a second gains at least this share of an average one: curves err, and a
run that learns nothing any more should still not lose a day. It keeps checkpoints within 4.5 times
the distance that is best for the wall clock."""

_STRETCHES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One entry per stretch; `stall_s` and `mean_progress` hold for the whole job."""

    seconds: Floats
    gain: Floats
    """By how much the loss falls in each, or its seconds when no curve is known."""

    failure_rate: Floats
    workers: Floats
    stall_s: float
    mean_progress: float
    """Gain per second over the whole job: what an average second is worth."""

    @property
    def progress(self) -> Floats:
        """Gain per second, never quite zero."""
        return np.maximum(self.gain / self.seconds, LEAST_GAIN_FRACTION * self.mean_progress)

    def survival(self, hazard: float) -> Floats:
        """The chance that the job has not been stopped by the middle of each stretch."""
        middle = np.cumsum(self.seconds) - self.seconds / 2
        return np.exp(-hazard * middle)


def look_ahead(situation: Situation, *, workers: Workers | None = None) -> Outlook:
    """First the stretch since the last checkpoint, then the rest of the job, ever more coarsely.

    Of a job without a known end it is thought that it will last as long again as it has. Steps are
    thought to take longer with fewer workers in proportion, because the batch stays the same.
    """
    costs, now = situation.costs, situation.step
    rest_steps = max(1, (situation.total_steps or 2 * now) - now)
    ends = _ends(now, rest_steps, workers)
    begins = np.concatenate(([now], ends[:-1]))
    present = float(max(1, situation.workers))
    then = _workers_at(workers, begins, present)
    seconds = np.concatenate(
        (
            [max(situation.seconds_since, costs.step_s)],
            (ends - begins) * costs.step_s * present / then,
        )
    )
    then = np.concatenate(([present], then))
    gain, mean_progress = seconds, 1.0
    job_s = max(situation.seconds, seconds[0]) + float(seconds[1:].sum())
    curve = situation.curve
    if curve is not None:
        marks = np.concatenate(([now - situation.steps_since, now], ends))
        gained = max(curve.gained(float(ends[-1])), 0.0)
        if gained > 0:
            gain, mean_progress = -np.diff(curve.losses(marks)), gained / job_s
    return Outlook(
        seconds=seconds,
        gain=gain,
        failure_rate=situation.failure_rate * then / present,
        workers=then,
        stall_s=max(costs.stall_s, LEAST_STALL_S),
        mean_progress=mean_progress,
    )


def look_back(
    losses: Floats,
    *,
    seconds: Floats,
    failure_rate: Floats,
    stall_s: float,
    workers: Floats | None = None,
) -> Outlook:
    """A whole run, one stretch per step, as known when it is over.

    `losses` holds one more entry than there are steps: the loss before the first, then after each.
    """
    best_so_far = np.minimum.accumulate(losses)
    gain = -np.diff(best_so_far)
    job_s = float(seconds.sum())
    is_falling = best_so_far[-1] < best_so_far[0]
    return Outlook(
        seconds=seconds,
        gain=gain if is_falling else seconds,
        failure_rate=failure_rate,
        workers=np.ones_like(seconds) if workers is None else workers,
        stall_s=max(stall_s, LEAST_STALL_S),
        mean_progress=float(gain.sum()) / job_s if is_falling else 1.0,
    )


def check_workers(field: str, workers: Workers | None) -> None:
    if workers is None or isinstance(workers, int):
        rounds: tuple[tuple[int, int], ...] = ((0, 1 if workers is None else workers),)
    else:
        rounds = workers
    steps = [step for step, _ in rounds]
    if not rounds or steps[0] != 0 or steps != sorted(set(steps)):
        raise ConfigError(field, workers, "must be (step, workers) pairs of rising steps from 0")
    if min(number for _, number in rounds) < 1:
        raise ConfigError(field, workers, "must be at least 1 worker at any time")


def _workers_at(workers: Workers | None, steps: Floats, present: float) -> Floats:
    if workers is None or isinstance(workers, int):
        return np.full(len(steps), present)
    starts = [step for step, _ in workers]
    return np.array([float(workers[bisect_right(starts, at) - 1][1]) for at in steps])


@cache
def _unit_spread() -> Floats:
    return np.linspace(0.0, 1.0, _STRETCHES + 1)[1:]


def _ends(now: int, rest_steps: int, workers: Workers | None) -> Floats:
    """Ends of stretches, each longer than the one before, and wherever the workers change."""
    ends = np.asarray(now + (1.0 + rest_steps) ** _unit_spread() - 1.0)
    if workers is None or isinstance(workers, int):
        return ends
    changes = [float(step) for step, _ in workers if now < step < now + rest_steps]
    return np.union1d(ends, changes)
