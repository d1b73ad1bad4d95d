from __future__ import annotations

import pytest

from everstep.schedule.bounds import lower_bound
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Variant
from everstep.schedule.workload import workload
from problems import problem


@pytest.mark.parametrize(("stage", "bound"), [(0, 30), (1, 28), (2, 28), (3, 30)])
def test_the_bound_sees_the_in_flight_limit(stage: int, bound: int) -> None:
    """Without a limit the work alone, 27, is the bound on every stage."""
    lost = [(1, stage)]
    assert lower_bound(workload(problem((3, 4, 6), lost))) == 27
    assert lower_bound(workload(problem((3, 4, 6), lost, in_flight=(4,) * 4))) == bound


def test_one_micro_batch_takes_exactly_its_round_trip() -> None:
    made = plan(problem((1, 8, 1)))
    assert (made.period, made.lower_bound, made.is_proved_optimal) == (17, 17, True)


@pytest.mark.parametrize("variant", list(Variant))
def test_unequal_durations_are_planned_checked_and_their_gap_reported(variant: Variant) -> None:
    """A last stage twice as long, transfers of 0.2 slots, an optimizer of 0.5."""
    stages = (StageDurations(),) * 3 + (
        StageDurations(forward=2, input_gradient=2, weight_gradient=2),
    )
    durations = Durations(stages=stages, transfer=0.2, optimizer=0.5)
    lost = [] if variant is Variant.ONE_F_ONE_B else [(1, 2)]
    made = plan(problem((3, 4, 6), lost, durations=durations, variant=variant), Effort())
    assert made.lower_bound >= 36.5
    assert 0 <= made.gap_fraction < 0.5
