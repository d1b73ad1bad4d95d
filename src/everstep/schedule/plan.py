"""A plan: what every worker does in one step, in order, with whom it talks and when.

Plain data. The executor runs it, the checker proves it, the renderers draw it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product, repeat
from typing import NamedTuple, TypeVar

from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind
from everstep.schedule.problem import Problem
from everstep.schedule.routing import Routes
from everstep.schedule.workload import Timetable, Workload, makespan, score

KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)

_HOLDS = {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 0, Kind.WEIGHT_GRADIENT: -1}
"""By how many each kind changes the number of micro-batches in flight."""


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
    actions = _actions(work, table)
    for operation in table.order:
        action = actions[operation]
        rows[action.worker].append(action)
    return {worker: tuple(row) for worker, row in rows.items()}


_Workers = Sequence[WorkerId | None]


def _actions(work: Workload, table: Timetable) -> list[Action]:
    """Of all operations, by number. Made a column at a time, one kind on one stage, because a plan
    has tens of thousands of them."""
    nobody: _Workers = [None] * work.num_jobs
    runs_on = [nobody, *_workers(work, table.routes), nobody]
    replicas = [job // work.microbatches for job in range(work.num_jobs)]
    microbatches = [job % work.microbatches for job in range(work.num_jobs)]
    lengths = (work.forward, work.input_gradient, work.weight_gradient)
    columns: list[Iterable[Action]] = []
    for stage, number in product(range(work.stages), range(len(KINDS))):
        before, here, after = runs_on[stage : stage + 3]
        starts = table.starts[len(columns) :: work.stages * 3]
        columns.append(
            map(
                Action,
                repeat(KINDS[number]),
                repeat(stage),
                replicas,
                microbatches,
                here,
                *peers_of(KINDS[number], before=before, after=after, nobody=nobody),
                work.in_units(starts),
                work.in_units([start + lengths[number][stage] for start in starts]),
            )
        )
    return list(chain.from_iterable(zip(*columns, strict=True)))


def _workers(work: Workload, routes: Routes) -> Iterator[_Workers]:
    """The routes, with one WorkerId for each worker and not one for each of its micro-batches."""
    for stage, row in enumerate(routes):
        workers = [WorkerId(replica, stage) for replica in range(work.replicas)]
        yield [workers[replica] for replica in row]


Peer = TypeVar("Peer")


def peers_of(kind: Kind, *, before: Peer, after: Peer, nobody: Peer) -> tuple[Peer, Peer]:
    """Whom an action receives from and sends to, given who runs the micro-batch on the stages
    before and after. F flows down the pipeline, B up; W stays. Peers of many may be asked at once.
    """
    if kind is Kind.FORWARD:
        return before, after
    if kind is Kind.INPUT_GRADIENT:
        return after, before
    return nobody, nobody


def sending_order(
    actions: Mapping[WorkerId, tuple[Action, ...]],
) -> dict[Channel, tuple[tuple[int, int], ...]]:
    """The order in which micro-batches enter every channel."""
    channels: dict[Channel, tuple[tuple[int, int], ...]] = {}
    for worker, row in actions.items():
        # The receiver tells the kind: F goes to the next stage, B to the one before.
        orders: dict[WorkerId, list[Action]] = defaultdict(list)
        for action in row:
            if action.sends_to is not None:
                orders[action.sends_to].append(action)
        for receiver, sent in orders.items():
            channel = Channel(worker, receiver, sent[0].kind)
            channels[channel] = tuple([(action.replica, action.microbatch) for action in sent])
    return channels


def peak_in_flight(problem: Problem, actions: Mapping[WorkerId, tuple[Action, ...]]) -> list[int]:
    """Per stage, the most micro-batches one worker holds between F and W."""
    peaks = [0] * problem.stages
    for worker, row in actions.items():
        held = [_HOLDS[action.kind] for action in row]
        peaks[worker.stage] = max(peaks[worker.stage], *accumulate(held, initial=0))
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
