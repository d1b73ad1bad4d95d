"""Failure normalization: is it worth moving a live worker to a harder-hit stage?

A stage with more losses than the others sets everyone's pace. Moving a worker from a better-off
stage costs one copy of the harder-hit stage's state, once, and saves time on every step. The idea
is ReCycle's; here it is a decision with its price.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heapreplace

from everstep.core.ids import WorkerId
from everstep.schedule.bounds import stage_bound
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem
from everstep.schedule.workload import workload


@dataclass(frozen=True, slots=True)
class Move:
    """The worker at `donor` leaves its place and fills `vacancy`."""

    donor: WorkerId
    vacancy: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    reason: str
    pays_after_steps: float | None = None
    """When moving would pay, had the losses long enough to last; None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalize:
    moves: tuple[Move, ...]
    lost: frozenset[WorkerId]
    """The empty places after the moves: as many as before, elsewhere."""

    period_before: float
    period_after: float
    pays_after_steps: float
    reason: str


def decide_normalization(
    problem: Problem,
    *,
    copy: float,
    horizon: float,
    effort: Effort | None = None,
    period_of: Callable[[Problem], float] | None = None,
) -> Normalize | Stay:
    """Weighs the saved time per step against the copies.

    Args:
        copy: time one worker's state takes to arrive, in the unit of the durations. Copies into
            different workers run at the same time; training waits for the slowest, so for one.
        horizon: how long the losses are expected to last, in the same unit.
        period_of: for those who remember periods; by default they are planned, with `effort`.
    """
    if not problem.lost:
        return Stay(reason="nobody is lost")
    best = best_distribution(problem)
    moves = choose_moves(problem, best)
    if not moves:
        return Stay(reason="the losses already lie as well as they can")
    lost_after = (problem.lost | {move.donor for move in moves}) - {m.vacancy for m in moves}
    if period_of is None:
        period_of = partial(_planned_period, effort=effort)
    before = period_of(problem)
    after = period_of(replace(problem, lost=lost_after))
    saved = before - after
    if saved <= 0:
        return Stay(reason=f"moving {_workers(moves)} would not shorten the step ({before:g})")
    pays_after = copy / saved
    price = (
        f"a copy takes {copy:g} and saves {saved:g} per step ({before:g} to {after:g}),"
        f" so it pays after {math.ceil(pays_after)} steps"
    )
    if pays_after * after + copy > horizon:
        return Stay(
            reason=f"{price}, more than the {horizon:g} the losses are expected to last",
            pays_after_steps=pays_after,
        )
    return Normalize(
        moves=moves,
        lost=lost_after,
        period_before=before,
        period_after=after,
        pays_after_steps=pays_after,
        reason=f"moving {_workers(moves)}: {price}",
    )


def _planned_period(problem: Problem, *, effort: Effort | None) -> float:
    return plan(problem, effort).period


def _workers(moves: tuple[Move, ...]) -> str:
    return ", ".join(f"{move.donor} to {move.vacancy}" for move in moves)


def best_distribution(problem: Problem) -> tuple[int, ...]:
    """How many losses each stage should have, for the same total: the lowest bound on the period,
    and among equals the fewest moves.

    A stage's bound depends on its own losses alone and grows with them. So the losses are dealt out
    one by one, each to the stage that bears it best: the dearest one dealt is the lowest bound.
    Every stage then keeps what it can bear within that, and only the rest is moved, to the stages
    that bear it best again.
    """
    work = workload(problem)

    def bound_with(stage: int, num_lost: int) -> int:
        return stage_bound(work, stage, num_live=problem.replicas - num_lost)

    def dealt(onto: list[int], number: int) -> list[int]:
        """`onto` with so many losses more; among equals the later stage, which holds its
        micro-batches for a shorter time."""
        bounds = [
            (bound_with(stage, lost + 1), -stage)
            for stage, lost in enumerate(onto)
            if lost + 1 < problem.replicas
        ]
        heapify(bounds)
        for _ in range(number):
            stage = -bounds[0][1]
            onto[stage] += 1
            if onto[stage] + 1 < problem.replicas:
                heapreplace(bounds, (bound_with(stage, onto[stage] + 1), -stage))
            else:
                heappop(bounds)
        return onto

    losses = Counter(worker.stage for worker in problem.lost)
    lowest = dealt([0] * problem.stages, len(problem.lost))
    bound = max(bound_with(stage, lost) for stage, lost in enumerate(lowest))
    kept = [
        bisect_right(range(1, losses[stage] + 1), bound, key=partial(bound_with, stage))
        for stage in range(problem.stages)
    ]
    return tuple(dealt(kept, len(problem.lost) - sum(kept)))


def choose_moves(problem: Problem, wanted: tuple[int, ...]) -> tuple[Move, ...]:
    """Who goes where. A donor of the vacancy's own replica is preferred: its neighbours in the
    pipeline are then the same, and its groups change least."""
    losses = Counter(worker.stage for worker in problem.lost)
    vacancies = [
        worker
        for stage in range(problem.stages)
        for worker in sorted(w for w in problem.lost if w.stage == stage)[
            : max(0, losses[stage] - wanted[stage])
        ]
    ]
    donor_stages = [
        stage
        for stage in range(problem.stages)
        for _ in range(max(0, wanted[stage] - losses[stage]))
    ]
    taken: set[WorkerId] = set()
    moves = []
    for vacancy, stage in zip(vacancies, donor_stages, strict=True):
        live = [WorkerId(r, stage) for r in problem.live(stage)]
        free = [worker for worker in live if worker not in taken]
        donor = min(free, key=lambda w: (w.replica != vacancy.replica, w.replica))
        taken.add(donor)
        moves.append(Move(donor, vacancy))
    return tuple(moves)
