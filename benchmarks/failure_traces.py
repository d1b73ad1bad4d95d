"""Runs a job with checkpoints at given steps through many failures at once, in numpy.

A trace is a row of exponential numbers, one per failure, and the moment at which somebody stops the
job. A failure comes when the danger since the last restart has added up to its number, so all
policies meet the same luck, whatever their length. Checkpoints are steps of a run without failures:
what is run again lies between two of them, so no policy would act differently there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everstep.checkpoint.curve_fit import Floats
from everstep.checkpoint.rehearsal import Recording, settled

MOST_FAILURES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    num: int
    seed: int
    stop_s: Floats
    """When each job is stopped by its owner; infinite for those that may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Per trace. What fault tolerance costs: stalls, restores and work that was run again."""

    wall_s: Floats
    overhead_s: Floats
    overhead_gpu_s: Floats
    lost_progress: Floats
    """Share of the whole gain: stalls at the mean rate of progress, and progress rolled back."""
    lost_progress_then: Floats
    """The same with each stall at the rate of progress of its moment."""
    missing_at_stop: Floats
    """Share of the whole gain that the last checkpoint lacks when the job is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The run without failures along the wall clock: sums up to the ends of steps and of stalls."""

    wall: Floats
    work: Floats
    gpu: Floats
    danger: Floats
    gained: Floats
    stall: Floats
    stall_gpu: Floats
    stall_gain: Floats
    marks: Floats
    """Where on the wall clock each checkpoint was complete and training went on."""
    durable: Floats

    @staticmethod
    def of(run: Recording, steps: tuple[int, ...]) -> _Line:
        num = len(run.losses)
        is_mark = np.zeros(num, dtype=bool)
        is_mark[[step - 1 for step in steps]] = True
        stall = np.where(is_mark, run.costs.stall_s, 0.0)
        best = settled(run.losses)
        gain = -np.diff(best) / max(best[0] - best[-1], 1e-12)
        zero = np.zeros(num)
        wall = _sums(run.seconds, stall)
        done = wall[2::2][is_mark]
        late = max(run.costs.durable_s - run.costs.stall_s, 0.0)
        return _Line(
            wall=wall,
            work=_sums(run.seconds, zero),
            gpu=_sums(run.seconds * run.workers, zero),
            danger=_sums(run.failure_rate * run.seconds, run.failure_rate * stall),
            gained=_sums(gain, zero),
            stall=_sums(zero, stall),
            stall_gpu=_sums(zero, stall * run.workers),
            stall_gain=_sums(zero, stall * gain / run.seconds),
            marks=np.concatenate(([0.0], done)),
            durable=np.concatenate(([0.0], done + late)),
        )


def _sums(steps: Floats, stalls: Floats) -> Floats:
    both = np.stack((steps, stalls), axis=1).ravel()
    return np.concatenate(([0.0], np.cumsum(both)))


def meet_failures(run: Recording, steps: tuple[int, ...], traces: Traces) -> Outcome:
    line = _Line.of(run, steps)
    draw = np.random.default_rng(traces.seed)
    end_s, job_s = line.wall[-1], line.work[-1]
    begin = np.zeros(traces.num)
    sums = {name: np.zeros(traces.num) for name in _FIELDS}
    alive = np.ones(traces.num, dtype=bool)
    for _ in range(MOST_FAILURES):
        luck = draw.exponential(size=traces.num)
        if not alive.any():
            break
        danger = np.interp(begin, line.wall, line.danger) + luck
        fails = np.where(danger < line.danger[-1], np.interp(danger, line.danger, line.wall), end_s)
        stops = begin + traces.stop_s - sums["wall"]
        until = np.minimum(np.minimum(fails, stops), end_s)
        has_failed = alive & (fails < np.minimum(stops, end_s))
        is_stopped = alive & (stops <= np.minimum(fails, end_s))
        last = line.marks[np.searchsorted(line.durable, until, side="right") - 1]
        # A checkpoint that was there at the restart is there still.
        back = np.maximum(last, begin)
        ran = until - begin
        _add(sums, "wall", alive, ran)
        for name in ("stall", "stall_gpu", "stall_gain"):
            _add(sums, name, alive, _between(line, name, begin, until))
        for name in ("work", "gpu", "gained"):
            _add(sums, name, has_failed, _between(line, name, back, until))
        _add(sums, "missing", is_stopped, _between(line, "gained", back, until))
        at = np.minimum(np.searchsorted(line.wall[2::2], back), len(run.workers) - 1)
        _add(sums, "wall", has_failed, np.full(traces.num, run.costs.restore_s))
        _add(sums, "restore", has_failed, np.full(traces.num, run.costs.restore_s))
        _add(sums, "restore_gpu", has_failed, run.costs.restore_s * run.workers[at])
        begin = np.where(has_failed, back, begin)
        # One that was to be stopped during its restore is stopped then.
        alive = has_failed & (sums["wall"] < traces.stop_s)
    else:
        raise RuntimeError(f"{alive.sum()} jobs saw {MOST_FAILURES} failures and are not over")
    return Outcome(
        wall_s=sums["wall"],
        overhead_s=sums["stall"] + sums["work"] + sums["restore"],
        overhead_gpu_s=sums["stall_gpu"] + sums["gpu"] + sums["restore_gpu"],
        lost_progress=sums["stall"] / job_s + sums["gained"],
        lost_progress_then=sums["stall_gain"] + sums["gained"],
        missing_at_stop=sums["missing"],
    )


_FIELDS = (
    "wall",
    "stall",
    "stall_gpu",
    "stall_gain",
    "work",
    "gpu",
    "gained",
    "missing",
    "restore",
    "restore_gpu",
)


def _between(line: _Line, name: str, begin: Floats, end: Floats) -> Floats:
    along: Floats = getattr(line, name)
    return np.asarray(np.interp(end, line.wall, along) - np.interp(begin, line.wall, along))


def _add(sums: dict[str, Floats], name: str, where: np.ndarray, amount: Floats) -> None:
    sums[name] += np.where(where, amount, 0.0)
