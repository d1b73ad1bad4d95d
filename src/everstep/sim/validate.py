"""Validates the simulator: a live run beside its replay, predicted against measured.

Taken from the run: its shape, what an action takes before the first loss, what the first recoveries
cost, and where losses and new workers came. Everything else is predicted; nothing here reads how
long the run took, but to compare.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from everstep.checkpoint.baselines import EverySteps
from everstep.sim.breakdown import Part, break_down
from everstep.sim.constants import Constants
from everstep.sim.job import Job, Layer
from everstep.sim.live_run import LiveRun
from everstep.sim.replay_run import replay
from everstep.sim.setting import Failures, Setting

BAR_FRACTION = 0.05
NEVER = EverySteps(1 << 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Between two changes of the cluster."""

    until_s: float
    num_lost: int
    predicted_steps: float
    measured_steps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    num_steps: int
    measured_s: float
    predicted_s: float
    """For as many steps."""

    spans: tuple[Span, ...]
    parts: tuple[Part, ...]
    """Both times by what they were spent on."""

    slowdown: float
    """What actions took after the first loss, over what they took before; predicted as 1."""

    @property
    def error_fraction(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def is_within_bar(self) -> bool:
        return abs(self.error_fraction) <= BAR_FRACTION


def validate(live: LiveRun, *, in_flight: int | None = None) -> Validation:
    """
    Args:
        in_flight: the job's limit; events do not tell it.
    """
    predicted_s = replay(live, setting_of(live, in_flight=in_flight))
    ends_s = list(accumulate(predicted_s))
    return Validation(
        num_steps=live.num_steps,
        measured_s=live.seconds,
        predicted_s=ends_s[-1],
        spans=tuple(_spans(live, ends_s)),
        parts=break_down(live.stretches, predicted_s),
        slowdown=live.slowdown,
    )


def setting_of(live: LiveRun, *, in_flight: int | None = None) -> Setting:
    """A loss is in the file from when it was noticed on, so that only halting is left; a new worker
    from when it came in; and the state is small enough to be copied in no time."""
    layers = tuple(
        Layer(
            forward=stage.forward,
            input_gradient=stage.input_gradient,
            weight_gradient=stage.weight_gradient,
            state_bytes=0.0,
            gradient_bytes=0.0,
            activation_bytes=0.0,
        )
        for stage in live.durations.stages
    )
    job = Job(
        name=live.trace.name,
        replicas=live.replicas,
        stages=live.stages,
        microbatches=live.microbatches,
        layers=layers,
        boundary_bytes=0.0,
        optimizer_s=live.durations.optimizer,
        measured=live.durations,
        limits=None if in_flight is None else (in_flight,) * live.stages,
    )
    constants = Constants(
        notice_loss_s=live.halting_s,
        groups_s=live.forming_s,
        groups_per_worker_s=0.0,
        join_boundary_steps=0.0,
    )
    return Setting(job=job, failures=Failures.of(live.trace), constants=constants, policy=NEVER)


def _spans(live: LiveRun, ends_s: Sequence[float]) -> Iterator[Span]:
    num_lost = 0
    for change in live.trace.changes():
        yield _span(live, ends_s, change.time_s, num_lost)
        num_lost += len(change.lost) - len(change.joined)
    yield _span(live, ends_s, live.seconds, num_lost)


def _span(live: LiveRun, ends_s: Sequence[float], until_s: float, num_lost: int) -> Span:
    return Span(
        until_s=until_s,
        num_lost=num_lost,
        predicted_steps=_steps_at(ends_s, until_s),
        measured_steps=float(sum(end_s <= until_s for end_s in live.step_ends_s)),
    )


def _steps_at(ends_s: Sequence[float], time_s: float) -> float:
    """With the share of the open step that has passed; after the end as fast as in the end."""
    done = bisect_right(ends_s, time_s)
    which = min(done, len(ends_s) - 1)
    began_s = ends_s[which - 1] if which else 0.0
    return which + (time_s - began_s) / (ends_s[which] - began_s)
