"""What the checker must see where times alone do not tell."""

from __future__ import annotations

import math
from dataclasses import replace

from everstep.core.ids import WorkerId
from everstep.schedule.check import check
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.plan import Plan
from everstep.schedule.planner import plan
from problems import problem


def with_first_two_swapped(made: Plan, worker: WorkerId) -> Plan:
    first, second, *rest = made.actions[worker]
    return replace(made, actions={**made.actions, worker: (second, first, *rest)})


def test_an_action_that_takes_no_time_may_not_stand_before_what_it_waits_for() -> None:
    """F and B of a stage that computes neither start at the same moment, in whatever order."""
    instant = StageDurations(forward=0, input_gradient=0, weight_gradient=1)
    made = plan(problem((1, 1, 1), durations=Durations(stages=(instant,))))
    swapped = with_first_two_swapped(made, WorkerId(0, 0))
    assert check(swapped) == ["worker 0:0 waits for ever before B0.0@0:0"]


def test_an_order_that_gets_stuck_is_refused_by_its_times_where_all_actions_take_time() -> None:
    made = plan(problem((1, 1, 1)))
    swapped = with_first_two_swapped(made, WorkerId(0, 0))
    assert "F0.0@0:0 starts at 0, before 0:0 is free at 2" in check(swapped)


def test_a_time_that_is_not_a_number_is_refused() -> None:
    """It is neither before nor after any other, so no comparison of starts would notice it."""
    made = plan(problem((2, 2, 2)))
    worker = WorkerId(0, 1)
    *rest, last = made.actions[worker]
    for spoiled in (last._replace(start=math.nan), last._replace(start=math.inf, end=math.inf)):
        assert check(replace(made, actions={**made.actions, worker: (*rest, spoiled)})) != []
