"""What a simulation found, as plain numbers: one row per system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.sim.account import Account, Cause
from everstep.sim.loop import run
from everstep.sim.periods import Quality
from everstep.sim.setting import Setting, System
from everstep.sim.systems.everstep import Rerouting
from everstep.sim.systems.registry import SYSTEMS
from everstep.sim.trace import HOUR_S, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    system: str
    does_not_fit: str | None
    fault_free_throughput: float
    """Samples per second, as are the other throughputs."""

    throughput: float
    """On average: what was kept over the time of the trace."""

    useful_fraction: float
    """Of the time, spent on steps that were kept."""

    steps: float
    steps_lost: float
    num_saves: int
    down_s: dict[str, float]
    rungs: dict[str, int]
    curve_s: tuple[float, ...]
    curve: tuple[float, ...]
    device_hours: float
    money: float | None
    money_per_million_samples: float | None
    periods: Quality | None
    """How the periods of a re-routing system were found."""


def simulate(
    trace: Trace,
    setting: Setting,
    *,
    systems: Sequence[str] | None = None,
    price_per_device_hour: float | None = None,
    on_done: Callable[[], None] | None = None,
) -> list[Outcome]:
    """All systems over the same trace."""
    outcomes = []
    for name in systems or SYSTEMS:
        system = SYSTEMS[name](setting)
        account = None if system.does_not_fit else run(system, trace, setting)
        outcomes.append(outcome_of(system, account, trace, setting, price=price_per_device_hour))
        if on_done is not None:
            on_done()
    return outcomes


def outcome_of(
    system: System,
    account: Account | None,
    trace: Trace,
    setting: Setting,
    *,
    price: float | None,
) -> Outcome:
    samples_per_step = setting.job.samples_per_step
    devices = setting.workers_per_node * setting.job.devices_per_worker
    device_hours = trace.up_node_seconds() * devices / HOUR_S
    account = account or Account(samples_per_step=samples_per_step)
    samples = account.steps * samples_per_step
    money = None if price is None else price * device_hours
    is_run = system.does_not_fit is None
    return Outcome(
        system=system.name,
        does_not_fit=system.does_not_fit,
        fault_free_throughput=samples_per_step / system.fault_free_step_s if is_run else 0.0,
        throughput=samples / trace.duration_s,
        useful_fraction=account.useful_s / trace.duration_s if is_run else 0.0,
        steps=account.steps,
        steps_lost=account.steps_lost,
        num_saves=account.num_saves,
        down_s={str(cause): account.down_s[cause] for cause in Cause if account.down_s[cause] > 0},
        rungs=dict(sorted(account.rungs.items())),
        curve_s=tuple(account.curve_s),
        curve=tuple(account.curve_rate),
        device_hours=device_hours,
        money=money,
        money_per_million_samples=money / samples * 1e6 if money is not None and samples else None,
        periods=system.periods.quality() if isinstance(system, Rerouting) else None,
    )
