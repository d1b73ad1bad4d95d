"""The solver against every possible placement of small jobs, and the objectives it serves."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.baselines import (
    CheckFreq,
    EverySeconds,
    EverySteps,
    PerEpoch,
    YoungDaly,
    coci_published,
)
from everstep.checkpoint.budget import BytesWritten, NumberOfCheckpoints
from everstep.checkpoint.curve_fit import Curve, Family, Floats
from everstep.checkpoint.objectives import (
    BestModelAtStop,
    GpuHours,
    LostProgress,
    Objective,
    WallClock,
)
from everstep.checkpoint.outlook import Outlook, look_back
from everstep.checkpoint.placement import expected_price, place, place_evenly
from everstep.checkpoint.policy import Costs, Policy, Situation

OBJECTIVES: list[Objective] = [
    WallClock(),
    GpuHours(),
    LostProgress(),
    LostProgress(hazard=0.05),
    BestModelAtStop(hazard=0.05),
]
BASELINES: list[Policy] = [
    EverySteps(3),
    EverySeconds(2.5),
    PerEpoch(),
    YoungDaly(),
    CheckFreq(),
    coci_published,
    *OBJECTIVES,
]

NUMBER = st.floats(0.01, 10.0)


@st.composite
def outlooks(draw: st.DrawFn, most: int = 9) -> Outlook:
    num = draw(st.integers(1, most))
    numbers = st.lists(NUMBER, min_size=num, max_size=num).map(np.array)
    falls = draw(st.lists(st.floats(0.0, 3.0), min_size=num, max_size=num))
    return look_back(
        np.array([0.0, *(-np.cumsum(falls))]),
        seconds=draw(numbers),
        failure_rate=0.1 * draw(numbers),
        stall_s=draw(st.floats(0.01, 3.0)),
        workers=np.ceil(draw(numbers)),
    )


def every_placement(num_stretches: int) -> list[tuple[int, ...]]:
    ends = range(1, num_stretches)
    return list(chain.from_iterable(combinations(ends, k) for k in range(num_stretches)))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@given(outlook=outlooks())
@settings(max_examples=60)
def test_no_placement_is_cheaper_than_the_solver_s(objective: Objective, outlook: Outlook) -> None:
    prices = objective.prices(outlook)
    least = min(expected_price(prices, marks) for marks in every_placement(len(outlook.seconds)))
    assert expected_price(prices, place(prices)) == pytest.approx(least, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@given(outlook=outlooks(), at_most=st.integers(0, 6))
@settings(max_examples=60)
def test_a_cap_on_the_number_is_kept_and_used_best(
    objective: Objective, outlook: Outlook, at_most: int
) -> None:
    prices = objective.prices(outlook)
    marks = place(prices, at_most=at_most)
    assert len(marks) <= at_most
    allowed = [m for m in every_placement(len(outlook.seconds)) if len(m) <= at_most]
    least = min(expected_price(prices, marks) for marks in allowed)
    assert expected_price(prices, marks) == pytest.approx(least, rel=1e-9, abs=1e-12)


@given(num=st.integers(2, 10), at_most=st.integers(1, 8), rate=NUMBER)
def test_ties_do_not_keep_the_cap_from_being_used(num: int, at_most: int, rate: float) -> None:
    """All stretches alike: many placements cost the same, and some numbers have no charge."""
    ones = np.ones(num)
    outlook = look_back(
        np.arange(num + 1, 0, -1.0), seconds=ones, failure_rate=rate * ones, stall_s=1e-3
    )
    prices = WallClock().prices(outlook)
    marks = place(prices, at_most=at_most)
    least = min(expected_price(prices, m) for m in every_placement(num) if len(m) <= at_most)
    assert expected_price(prices, marks) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@given(outlook=outlooks(most=40), data=st.data())
@settings(max_examples=40)
def test_no_even_placement_and_no_named_rule_is_cheaper(
    objective: Objective, outlook: Outlook, data: st.DataObject
) -> None:
    prices = objective.prices(outlook)
    least = expected_price(prices, place(prices))
    num = len(outlook.seconds)
    for number in range(num):
        assert expected_price(prices, place_evenly(num, number)) >= least * (1 - 1e-9) - 1e-12
    policy = data.draw(st.sampled_from(BASELINES))
    assert expected_price(prices, marks_of(policy, outlook)) >= least * (1 - 1e-9) - 1e-12


def marks_of(policy: Policy, outlook: Outlook) -> tuple[int, ...]:
    """Where a policy saves, asked after every step but the last."""
    curve = Curve(
        family=Family.EXPONENTIAL,
        first_step=0,
        span_steps=10,
        floor=1,
        drop=1,
        rate=2.0,
        offset=1.0,
    )
    marks: list[int] = []
    elapsed = np.cumsum(outlook.seconds)
    for step in range(1, len(elapsed)):
        last = marks[-1] if marks else 0
        since = elapsed[step - 1] - (elapsed[last - 1] if last else 0.0)
        situation = Situation(
            step=step,
            steps_since=step - last,
            seconds=float(elapsed[step - 1]) + outlook.stall_s * len(marks),
            seconds_since=float(since),
            costs=Costs(step_s=float(outlook.seconds.mean()), stall_s=outlook.stall_s),
            failure_rate=float(outlook.failure_rate[step - 1]),
            total_steps=len(elapsed),
            curve=curve,
            spent_s=outlook.stall_s * len(marks),
            num_taken=len(marks),
            loader_length=4,
        )
        if policy.is_due(situation):
            marks.append(step)
    return tuple(marks)


CURVES = st.builds(
    Curve,
    family=st.sampled_from(Family),
    first_step=st.just(0.0),
    span_steps=st.floats(1.0, 1e4),
    floor=st.floats(-5, 5),
    drop=st.floats(1e-6, 1e3),
    rate=st.floats(0.1, 20),
    offset=st.floats(1e-3, 1.0),
)


def jobs(policy: Policy, situation: Situation, num_steps: int) -> list[Situation]:
    """The situations in which `policy` saved, in a job of equal steps."""
    saved: list[Situation] = []
    costs = situation.costs
    for step in range(1, num_steps + 1):
        last = saved[-1].step if saved else 0
        stalled_s = len(saved) * costs.stall_s
        here = Situation(
            step=step,
            steps_since=step - last,
            seconds=step * costs.step_s + stalled_s,
            seconds_since=(step - last) * costs.step_s,
            costs=costs,
            failure_rate=situation.failure_rate,
            total_steps=situation.total_steps,
            curve=situation.curve if step > 5 else None,
            spent_s=stalled_s,
            num_taken=len(saved),
            loader_length=situation.loader_length,
        )
        first, again = policy.is_due(here), policy.is_due(here)
        assert first == again
        if first:
            saved.append(here)
    return saved


@st.composite
def beginnings(draw: st.DrawFn) -> tuple[Situation, int]:
    num_steps = draw(st.sampled_from([1, 2, 7, 60, 120]))
    situation = Situation(
        step=0,
        steps_since=0,
        seconds=0.0,
        seconds_since=0.0,
        costs=Costs(
            step_s=draw(st.sampled_from([0.05, 1.0, 30.0])),
            stall_s=draw(st.floats(0.0, 5)),
            durable_s=draw(st.sampled_from([0.0, 20.0])),
            size_bytes=draw(st.integers(0, 1000)),
        ),
        failure_rate=draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 10.0])),
        total_steps=draw(st.sampled_from([None, num_steps])),
        curve=draw(st.none() | CURVES),
        loader_length=draw(st.integers(1, 50)),
    )
    return situation, num_steps


@given(
    beginning=beginnings(), share=st.sampled_from([0.01, 0.05, 0.3, 1.0]), hazard=st.floats(0, 1e-3)
)
@settings(max_examples=100, deadline=None)
def test_stalls_never_take_more_than_their_share_of_the_time(
    beginning: tuple[Situation, int], share: float, hazard: float
) -> None:
    situation, num_steps = beginning
    saved = jobs(LostProgress(budget=share, hazard=hazard), situation, num_steps)
    stall_s = situation.costs.stall_s
    whole_s = num_steps * situation.costs.step_s
    assert len(saved) * stall_s <= share * whole_s * (1 + 1e-9) + share * len(saved) * stall_s
    if situation.total_steps is None:
        for number, here in enumerate(saved, start=1):
            assert number * stall_s <= share * here.seconds * (1 + 1e-9)
    else:
        assert len(saved) * stall_s <= share * whole_s * (1 + 1e-9)


@given(beginning=beginnings(), number=st.integers(1, 10), size_bytes=st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_numbers_and_bytes_are_never_exceeded(
    beginning: tuple[Situation, int], number: int, size_bytes: int
) -> None:
    situation, num_steps = beginning
    assert (
        len(jobs(LostProgress(budget=NumberOfCheckpoints(number)), situation, num_steps)) <= number
    )
    written = len(jobs(LostProgress(budget=BytesWritten(size_bytes)), situation, num_steps))
    assert written * situation.costs.size_bytes <= size_bytes


@pytest.mark.parametrize("policy", BASELINES, ids=repr)
@given(beginning=beginnings())
@settings(max_examples=20, deadline=None)
def test_every_policy_answers_the_same_twice_and_never_twice_in_a_step(
    policy: Policy, beginning: tuple[Situation, int]
) -> None:
    situation, num_steps = beginning
    for here in jobs(policy, situation, min(num_steps, 40)):
        assert here.steps_since >= 1


@given(outlook=outlooks(), factor=st.sampled_from([0.25, 4.0, 64.0]))
@settings(max_examples=60)
def test_the_unit_of_the_loss_does_not_move_a_checkpoint(outlook: Outlook, factor: float) -> None:
    scaled = Outlook(
        seconds=outlook.seconds,
        gain=outlook.gain * factor,
        failure_rate=outlook.failure_rate,
        workers=outlook.workers,
        stall_s=outlook.stall_s,
        mean_progress=outlook.mean_progress * factor,
    )
    for objective in OBJECTIVES:
        assert place(objective.prices(outlook)) == place(objective.prices(scaled))


def test_progress_that_is_everywhere_the_same_is_protected_evenly() -> None:
    num = 120
    ones: Floats = np.ones(num)
    outlook = look_back(
        np.linspace(5.0, 1.0, num + 1), seconds=ones, failure_rate=0.01 * ones, stall_s=0.5
    )
    marks = place(LostProgress().prices(outlook), at_most=11)
    assert np.ptp(np.diff([0, *marks, num])) <= 1
