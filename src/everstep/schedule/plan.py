"""A plan: what every worker does in one step, in order, with whom it talks and when.

Plain data. The executor runs it, the checker proves it, the renderers draw it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind
from everstep.schedule.problem import Problem
from everstep.schedule.workload import Timetable, Workload, makespan, score

KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class Channel(NamedTuple):
    """One ordered pair of workers and one direction: activations (F) or gradients (B). A tuple,
    because orders are looked up by it a great many times."""

    sender: WorkerId
    receiver: WorkerId
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Periods of the same job arranged in other ways."""

    one_f_one_b: float
    """Nobody lost, 1F1B."""

    decoupled: float
    """Nobody lost, decoupled and staggered under the same in-flight limits."""

    fault_scaled: float
    """The decoupled throughput times the share of live workers: what a loss costs at best,
    were work infinitely divisible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    problem: Problem
    actions: Mapping[WorkerId, tuple[Action, ...]]
    """Of every live worker, in the order it runs them."""

    channels: Mapping[Channel, tuple[tuple[int, int], ...]]
    """(replica, micro-batch) in the order they pass: order alone matches sends to receives."""

    period: float
    makespan: float
    lower_bound: float
    load_bound: float
    is_proved_optimal: bool
    """The period equals a lower bound, or a solver showed that nothing shorter exists."""

    peak_in_flight: tuple[int, ...]
    """Per stage, of the worker that holds the most."""

    baselines: Baselines

    @property
    def gap_fraction(self) -> float:
        """How far the period may be from the best, as a share of the bound."""
        return self.period / self.lower_bound - 1.0


def lay_out(
    problem: Problem, work: Workload, table: Timetable
) -> dict[WorkerId, tuple[Action, ...]]:
    """The timetable as actions of workers."""
    rows: dict[WorkerId, list[Action]] = {
        WorkerId(replica, stage): []
        for replica in range(problem.replicas)
        for stage in range(problem.stages)
        if WorkerId(replica, stage) not in problem.lost
    }
    grid = [[WorkerId(r, s) for r in range(work.replicas)] for s in range(work.stages)]
    durations = (work.forward, work.input_gradient, work.weight_gradient)
    for operation in table.order:
        place, kind = divmod(operation, 3)
        job, stage = divmod(place, work.stages)
        replica, microbatch = divmod(job, work.microbatches)
        worker = grid[stage][table.routes[stage][job]]
        before = grid[stage - 1][table.routes[stage - 1][job]] if stage else None
        is_last = stage + 1 == work.stages
        after = None if is_last else grid[stage + 1][table.routes[stage + 1][job]]
        receives_from, sends_to = peers_of(KINDS[kind], before=before, after=after)
        start = table.starts[operation]
        rows[worker].append(
            Action(
                KINDS[kind],
                stage,
                replica,
                microbatch,
                worker,
                receives_from,
                sends_to,
                work.units(start),
                work.units(start + durations[kind][stage]),
            )
        )
    return {worker: tuple(row) for worker, row in rows.items()}


def peers_of(
    kind: Kind, *, before: WorkerId | None, after: WorkerId | None
) -> tuple[WorkerId | None, WorkerId | None]:
    """Whom an action receives from and sends to, given who runs the micro-batch on the stages
    before and after. F flows down the pipeline, B up; W stays."""
    if kind is Kind.FORWARD:
        return before, after
    if kind is Kind.INPUT_GRADIENT:
        return after, before
    return None, None


def sending_order(
    actions: Mapping[WorkerId, tuple[Action, ...]],
) -> dict[Channel, tuple[tuple[int, int], ...]]:
    """The order in which micro-batches enter every channel."""
    # Plain tuples are made faster, and there are many more messages than channels.
    orders: dict[tuple[WorkerId, WorkerId, Kind], list[tuple[int, int]]] = defaultdict(list)
    for worker, row in actions.items():
        for action in row:
            if action.sends_to is not None:
                channel = (worker, action.sends_to, action.kind)
                orders[channel].append((action.replica, action.microbatch))
    return {Channel(*channel): tuple(order) for channel, order in orders.items()}


def peak_in_flight(problem: Problem, actions: Mapping[WorkerId, tuple[Action, ...]]) -> list[int]:
    """Per stage, the most micro-batches one worker holds between F and W."""
    peaks = [0] * problem.stages
    for worker, row in actions.items():
        held = 0
        for action in row:
            if action.kind is Kind.FORWARD:
                held += 1
                peaks[worker.stage] = max(peaks[worker.stage], held)
            elif action.kind is Kind.WEIGHT_GRADIENT:
                held -= 1
    return peaks


def make_plan(
    problem: Problem,
    work: Workload,
    table: Timetable,
    *,
    lower_bound: int,
    load_bound: int,
    baselines: Baselines,
) -> Plan:
    actions = lay_out(problem, work, table)
    period = score(work, table.starts).period
    return Plan(
        problem=problem,
        actions=actions,
        channels=sending_order(actions),
        period=work.units(period),
        makespan=work.units(makespan(work, table.starts)),
        lower_bound=work.units(lower_bound),
        load_bound=work.units(load_bound),
        is_proved_optimal=period <= lower_bound,
        peak_in_flight=tuple(peak_in_flight(problem, actions)),
        baselines=baselines,
    )
