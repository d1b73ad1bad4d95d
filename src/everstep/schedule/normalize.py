"""Failure normalization: is it worth moving a live worker to a harder-hit stage?

A stage with more losses than the others sets everyone's pace. Moving a worker from a better-off
stage costs one copy of the harder-hit stage's state, once, and saves time on every step. The idea
is ReCycle's; here it is a decision with its price.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from everstep.core.ids import WorkerId
from everstep.schedule.bounds import lower_bound
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
    problem: Problem, *, copy: float, horizon: float, effort: Effort | None = None
) -> Normalize | Stay:
    """Weighs the saved time per step against the copies.

    Args:
        copy: time one worker's state takes to arrive, in the unit of the durations. Copies into
            different workers run at the same time; training waits for the slowest, so for one.
        horizon: how long the losses are expected to last, in the same unit.
    """
    if not problem.lost:
        return Stay(reason="nobody is lost")
    best = best_distribution(problem)
    moves = choose_moves(problem, best)
    if not moves:
        return Stay(reason="the losses already lie as well as they can")
    lost_after = (problem.lost | {move.donor for move in moves}) - {m.vacancy for m in moves}
    before = plan(problem, effort).period
    after = plan(replace(problem, lost=lost_after), effort).period
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


def _workers(moves: tuple[Move, ...]) -> str:
    return ", ".join(f"{move.donor} to {move.vacancy}" for move in moves)


def best_distribution(problem: Problem) -> tuple[int, ...]:
    """How many losses each stage should have, for the same total: the lowest bound on the period,
    and among equals the fewest moves.

    Dynamic programming over stages and losses placed so far; each stage's bound depends on its own
    losses alone, so the best of the rest can be found once for each number left.
    """
    losses = Counter(worker.stage for worker in problem.lost)
    limit = problem.replicas - 1

    @cache
    def bound_with(stage: int, num_lost: int) -> int:
        lost = frozenset(WorkerId(replica, stage) for replica in range(num_lost))
        return lower_bound(workload(replace(problem, lost=lost)))

    @cache
    def best_from(stage: int, left: int) -> tuple[int, int, tuple[int, ...]] | None:
        """(period, workers moved in, losses per stage from `stage` on)."""
        if stage == problem.stages:
            return (0, 0, ()) if left == 0 else None
        candidates = []
        for num_lost in range(min(limit, left) + 1):
            rest = best_from(stage + 1, left - num_lost)
            if rest is not None:
                period, moved, distribution = rest
                moved += max(0, losses[stage] - num_lost)
                period = max(period, bound_with(stage, num_lost))
                candidates.append((period, moved, (num_lost, *distribution)))
        return min(candidates, default=None)

    best = best_from(0, len(problem.lost))
    assert best is not None, "the current losses are themselves a distribution"
    return best[2]


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
