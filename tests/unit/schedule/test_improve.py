"""The improver on shapes that were once too far from the bound, with attempts for seconds."""

from __future__ import annotations

import random

import pytest

from counting_clock import CountingClock
from everstep.schedule.bounds import lower_bound, nearly
from everstep.schedule.greedy import list_schedule, priorities
from everstep.schedule.improve import improve
from everstep.schedule.late import Delay, after_idling, delays, late_workers, lateness
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem
from everstep.schedule.routing import route
from everstep.schedule.workload import B, score, workload
from problems import problem


def with_losses(shape: tuple[int, int, int], num_lost: int, *, seed: int) -> Problem:
    """As benchmarks/planner.py draws them."""
    places = [(replica, stage) for replica in range(shape[0]) for stage in range(shape[1])]
    return problem(shape, random.Random(seed).sample(places, num_lost))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("shape", "num_lost", "seed", "bound"),
    [
        ((13, 8, 11), 6, 323840427, 39),
        ((28, 7, 9), 12, 64163682, 33),
        ((31, 8, 12), 22, 959680889, 43),
        ((13, 7, 11), 8, 443009851, 39),
        ((27, 7, 12), 10, 995454566, 39),
    ],
)
def test_few_micro_batches_and_several_losses_are_planned_near_the_bound(
    shape: tuple[int, int, int], num_lost: int, seed: int, bound: int
) -> None:
    """Draws of routes and rules left these 3 slots above the bound after a second: a few
    workers of stage 0 were late, and the period alone does not say which, nor for what they wait.
    """
    question = with_losses(shape, num_lost, seed=seed)
    made = plan(question, Effort(improve_s=1, insist_s=300), clock=CountingClock())
    assert made.lower_bound == bound
    assert made.period <= bound + 2


def test_the_improver_insists_only_while_it_is_far_from_the_bound() -> None:
    question = with_losses((13, 8, 11), 6, seed=323840427)
    work, routes = workload(question), route(question)
    given = list_schedule(work, routes, priorities(work))
    near = nearly(work, lower_bound(work))
    assert score(work, given.starts).period > near

    def looks(near: int) -> float:
        clock = CountingClock()
        improve(work, given, target=0, budget_s=3, insist_s=20, near=near, clock=clock)
        return clock.now_s()

    assert looks(near=0) == pytest.approx(looks(near=10**6) + 17)


def test_near_is_two_slots_or_two_percent() -> None:
    work = workload(problem((3, 4, 6)))
    assert nearly(work, 27) == 29
    assert nearly(work, 200) == 204


def test_what_a_late_worker_waited_for_is_found_where_it_was_held_up() -> None:
    """One replica, two stages, two micro-batches, B first:

    stage 0   F0 F1 .  B0 W0 B1 W1
    stage 1   .  F0 B0 F1 B1 W0 W1
    """
    work = workload(problem((1, 2, 2)))
    routes = route(problem((1, 2, 2)))
    starts = list_schedule(work, routes, priorities(work)).starts
    b0, b1 = 1, 7
    assert (starts[b0], starts[b1]) == (3, 5)
    assert score(work, starts).period == 7
    assert lateness(work, starts, goal=6) == 1
    assert late_workers(work, routes, starts, goal=6) == [(0, 0)]
    assert after_idling(work, starts, [0, 1, 2, 6, 7, 8]) == [b0]
    # Micro-batch 1 waits for F0 on stage 0 and for B0 on stage 1.
    assert delays(work, starts, b1) == [Delay(9, 2), Delay(6, 0)]
    assert b1 % 3 == B
