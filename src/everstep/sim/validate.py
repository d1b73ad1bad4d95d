"""Replays a live run: its losses and joins through the simulator, predicted against measured."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.checkpoint.baselines import EverySteps
from everstep.schedule.problem import Variant
from everstep.sim.account import Account
from everstep.sim.constants import Constants
from everstep.sim.job import Job, Layer
from everstep.sim.live_run import LiveRun
from everstep.sim.setting import Failures, Setting
from everstep.sim.systems.everstep import Rerouting

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

    @property
    def error_fraction(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def is_within_bar(self) -> bool:
        return abs(self.error_fraction) <= BAR_FRACTION


def validate(live: LiveRun, *, in_flight: int | None = None) -> Validation:
    """Moves between stages are in the file, each a loss and a join, so the replay decides none.

    Args:
        in_flight: the job's limit; events do not tell it.
    """
    setting = setting_of(live, in_flight=in_flight)
    system = Rerouting(
        setting, name="everstep", variant=Variant.DECOUPLED_STAGGERED, is_normalizing=False
    )
    account = Account(samples_per_step=1)
    system.begin([], account)
    spans, num_lost = [], 0
    for change in live.trace.changes():
        account.advance(change.time_s)
        spans.append(_span(live, change.time_s, num_lost, account))
        system.change(list(change.lost), list(change.joined), account)
        num_lost += len(change.lost) - len(change.joined)
    account.advance(live.seconds)
    spans.append(_span(live, live.seconds, num_lost, account))
    # What is missing at the end, or was done too much, at the pace of the end.
    predicted_s = live.seconds + (live.num_steps - account.steps) * account.step_s
    return Validation(
        num_steps=live.num_steps,
        measured_s=live.seconds,
        predicted_s=predicted_s,
        spans=tuple(spans),
    )


def setting_of(live: LiveRun, *, in_flight: int | None = None) -> Setting:
    """Exits are noticed at once there, and its state is small enough to be copied in no time."""
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
    constants = Constants(notice_loss_s=0.0, groups_s=live.change_s, groups_per_worker_s=0.0)
    return Setting(job=job, failures=Failures.of(live.trace), constants=constants, policy=NEVER)


def _span(live: LiveRun, until_s: float, num_lost: int, account: Account) -> Span:
    return Span(
        until_s=until_s,
        num_lost=num_lost,
        predicted_steps=account.steps,
        measured_steps=float(sum(end_s <= until_s for end_s in live.step_ends_s)),
    )
