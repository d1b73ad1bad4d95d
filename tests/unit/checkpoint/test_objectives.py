from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from everstep.checkpoint.baselines import (
    CheckFreq,
    EverySeconds,
    EverySteps,
    PerEpoch,
    YoungDaly,
    coci_published,
)
from everstep.checkpoint.budget import BytesWritten, NumberOfCheckpoints, ShareOfTime
from everstep.checkpoint.curve_fit import Curve, Family
from everstep.checkpoint.objectives import BestModelAtStop, GpuHours, LostProgress, WallClock
from everstep.checkpoint.outlook import Workers, look_ahead
from everstep.checkpoint.placement import intervals_s
from everstep.checkpoint.policy import Costs, Policy, Situation
from everstep.checkpoint.rehearsal import Recording, rehearse
from everstep.core.errors import ConfigError

COSTS = Costs(step_s=1.0, stall_s=2.0)
RATE = 1e-4
YOUNG_DALY_S = 200.0  # sqrt(2 * 2 / 1e-4)

HERE = Situation(
    step=1000,
    steps_since=100,
    seconds=1000.0,
    seconds_since=100.0,
    costs=COSTS,
    failure_rate=RATE,
    total_steps=4000,
)
CURVE = Curve(
    family=Family.EXPONENTIAL,
    first_step=0,
    span_steps=4000,
    floor=1.0,
    drop=2.0,
    rate=8.0,
    offset=1.0,
)


def after(steps: int, situation: Situation = HERE) -> Situation:
    return replace(situation, steps_since=steps, seconds_since=steps * situation.costs.step_s)


def first_due(policy: Policy, situation: Situation = HERE) -> int:
    return next(steps for steps in range(1, 3000) if policy.is_due(after(steps, situation)))


def recording(num: int, *, curve: Curve | None, rate: float = RATE) -> Recording:
    ones = np.ones(num)
    losses = ones if curve is None else curve.losses(np.arange(1.0, num + 1))
    return Recording(
        losses=losses,
        curves=(curve,) * num,
        seconds=ones,
        workers=ones,
        failure_rate=rate * ones,
        costs=COSTS,
    )


@pytest.mark.parametrize("policy", [WallClock(), GpuHours(), YoungDaly(), LostProgress()], ids=repr)
def test_without_a_curve_everybody_keeps_to_young_and_daly(policy: Policy) -> None:
    assert first_due(policy) in (199, 200)
    assert first_due(policy, replace(HERE, total_steps=None)) in (199, 200)


def test_the_better_of_two_step_boundaries_is_taken() -> None:
    """With tau = 200 s and steps of 150 s, one step is nearer in cost than two."""
    costs = Costs(step_s=150.0, stall_s=2.0)
    coarse = replace(HERE, costs=costs)
    assert first_due(WallClock(), coarse) == 1
    assert first_due(YoungDaly(), coarse) == 2


def test_a_stop_without_notice_is_one_more_danger() -> None:
    assert first_due(BestModelAtStop(hazard=3 * RATE)) in (99, 100)


def test_a_checkpoint_waits_for_the_last_one_to_be_durable() -> None:
    slow = replace(HERE, costs=replace(COSTS, durable_s=450.0))
    assert first_due(WallClock(), slow) == 450


def test_nothing_is_due_right_after_a_checkpoint_or_without_danger() -> None:
    assert not WallClock().is_due(after(0))
    assert not WallClock().is_due(replace(after(3000), failure_rate=0.0))


def test_checkpoints_are_dense_where_the_loss_falls_and_rare_where_it_does_not() -> None:
    run = recording(1000, curve=replace(CURVE, span_steps=1000), rate=16 * RATE)
    marks = np.array(rehearse(LostProgress(), run))
    early, late = (marks <= 500).sum(), (marks > 500).sum()
    even = len(rehearse(YoungDaly(), run))
    assert early >= 2 * late
    assert len(marks) < even


def test_a_budget_that_binds_is_spent_but_not_passed() -> None:
    run = recording(1000, curve=None, rate=1e-3)
    assert len(rehearse(YoungDaly(), run)) == 15
    for share, allowed in ((0.01, 5), (0.02, 10)):
        assert allowed - 1 <= len(rehearse(LostProgress(budget=share), run)) <= allowed


def test_a_job_of_unknown_length_spends_no_more_than_its_share_so_far() -> None:
    run = recording(1000, curve=CURVE, rate=1e-2)
    marks = rehearse(LostProgress(budget=0.035), run, is_end_known=False)
    for number, step in enumerate(marks, start=1):
        assert number * COSTS.stall_s <= 0.035 * (step + number * COSTS.stall_s)
    assert marks


def test_numbers_and_bytes_are_budgets_too() -> None:
    run = recording(600, curve=CURVE, rate=1e-2)
    run = replace(run, costs=replace(COSTS, size_bytes=100))
    assert len(rehearse(LostProgress(budget=NumberOfCheckpoints(7)), run)) in (6, 7)
    assert len(rehearse(LostProgress(budget=BytesWritten(799)), run)) in (6, 7)


def test_more_workers_fail_more_often_so_their_work_is_saved_more_often() -> None:
    schedule: Workers = ((0, 8), (2000, 2))
    situation = replace(HERE, workers=8)
    for objective in (WallClock(workers=schedule), GpuHours(workers=schedule)):
        outlook = look_ahead(situation, workers=schedule)
        taus = intervals_s(objective.prices(outlook))
        assert taus[0] == pytest.approx(YOUNG_DALY_S)
        assert taus[-1] == pytest.approx(2 * YOUNG_DALY_S)
    assert float(look_ahead(situation, workers=schedule).seconds.sum()) == pytest.approx(
        100 + 1000 + 2000 * 4
    )


def test_early_stops_move_a_binding_budget_forward() -> None:
    run = recording(1000, curve=None, rate=4e-3)
    stopped = rehearse(LostProgress(budget=NumberOfCheckpoints(8), hazard=4e-3), run)
    plain = rehearse(LostProgress(budget=NumberOfCheckpoints(8)), run)
    assert np.mean(stopped) < np.mean(plain) - 75


def test_check_freq_starts_with_what_the_disk_takes_and_widens_by_two_to_its_budget() -> None:
    quick = replace(HERE, costs=Costs(step_s=1.0, stall_s=0.1, durable_s=12.05))
    assert CheckFreq().interval_steps(quick) == 12
    costly = replace(HERE, costs=Costs(step_s=1.0, stall_s=2.0, durable_s=12.0))
    assert CheckFreq().interval_steps(costly) == 58  # 2 / 58 is the first share below 3.5 %
    assert first_due(CheckFreq(), replace(costly, step=999, loader_length=300)) == 58
    assert CheckFreq().is_due(replace(after(1, costly), step=900, loader_length=300))


def test_check_freq_does_not_look_at_the_failure_rate() -> None:
    assert first_due(CheckFreq()) == first_due(CheckFreq(), replace(HERE, failure_rate=1.0))


def test_the_plain_rules_do_what_they_say() -> None:
    assert first_due(EverySteps(7)) == 7
    assert first_due(EverySeconds(6.5)) == 7
    assert [PerEpoch().is_due(replace(HERE, step=s, loader_length=50)) for s in (99, 100)] == [
        False,
        True,
    ]
    with pytest.raises(ConfigError, match="EverySteps"):
        PerEpoch().is_due(HERE)


def test_coci_as_published_saves_after_equal_drops_of_the_loss() -> None:
    run = recording(1000, curve=replace(CURVE, floor=1e-9, span_steps=1000), rate=16 * RATE)
    marks = rehearse(coci_published, run)
    assert marks
    assert not coci_published.is_due(after(500))  # no curve, no checkpoint


@pytest.mark.parametrize(
    "make",
    [
        lambda: LostProgress(budget=0.0),
        lambda: LostProgress(budget=1.5),
        lambda: LostProgress(hazard=-1.0),
        lambda: BestModelAtStop(hazard=float("nan")),
        lambda: GpuHours(workers=0),
        lambda: WallClock(workers=((5, 2),)),
        lambda: WallClock(workers=((0, 2), (0, 3))),
        lambda: ShareOfTime(0.0),
        lambda: NumberOfCheckpoints(0),
        lambda: BytesWritten(0),
        lambda: EverySteps(0),
        lambda: EverySeconds(0.0),
        lambda: CheckFreq(budget=0.0),
        lambda: Costs(step_s=0.0, stall_s=1.0),
        lambda: Costs(step_s=1.0, stall_s=-1.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()
