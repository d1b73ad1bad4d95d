"""The choice of groups against every one of the 2**(P-1) groupings of small jobs."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.recovery.grouping import (
    Boundary,
    Costs,
    Grouping,
    StageCost,
    choose_groups,
    recovery_s,
    tradeoff,
)

# Few different sizes and times, so that ties are common; and anything, so that they are rare.
SIZES = st.integers(0, 3) | st.integers(0, 10**9)
TIMES = st.integers(0, 3).map(float) | st.floats(0, 100)
BUDGETS = st.integers(0, 100) | st.integers(0, 10**12)


@st.composite
def all_costs(draw: st.DrawFn) -> Costs:
    num_stages = draw(st.integers(1, 8))
    stage = st.builds(
        StageCost,
        replay_s=TIMES,
        update_s=TIMES,
        load_s=TIMES,
        failure_rate=st.integers(1, 3).map(float) | st.floats(0.01, 10),
    )
    boundary = st.builds(Boundary, forward_bytes=SIZES, backward_bytes=SIZES)
    return Costs(
        stages=draw(st.tuples(*[stage] * num_stages)),
        boundaries=draw(st.tuples(*[boundary] * (num_stages - 1))),
        microbatches=draw(st.integers(1, 12)),
        interval_steps=draw(st.integers(1, 50)),
        workers=draw(st.none() | st.integers(num_stages, 30)),
        helpers=draw(st.none() | st.integers(0, 12)),
    )


def every_grouping(costs: Costs) -> list[Grouping]:
    """By their definition, without the code under test: every set of cuts."""
    num_stages = len(costs.stages)
    total_rate = sum(stage.failure_rate for stage in costs.stages)
    found = []
    for is_cut in product((False, True), repeat=num_stages - 1):
        cuts = [boundary for boundary, cut in enumerate(is_cut) if cut]
        edges = [0, *(cut + 1 for cut in cuts), num_stages]
        groups = tuple(range(a, b) for a, b in pairwise(edges))
        expected_s = sum(
            costs.stages[stage].failure_rate / total_rate * recovery_s(costs, group)
            for group in groups
            for stage in group
        )
        step_bytes = sum(
            costs.boundaries[cut].forward_bytes + costs.boundaries[cut].backward_bytes
            for cut in cuts
        )
        found.append(
            Grouping(groups=groups, bytes=step_bytes * costs.interval_steps, expected_s=expected_s)
        )
    return found


@given(costs=all_costs(), budget=BUDGETS)
def test_no_grouping_within_the_budget_recovers_faster(costs: Costs, budget: int) -> None:
    chosen = choose_groups(costs, budget)
    affordable = [grouping for grouping in every_grouping(costs) if grouping.bytes <= budget]
    assert chosen.bytes <= budget
    assert chosen.expected_s == pytest.approx(min(g.expected_s for g in affordable))


@given(costs=all_costs(), budget=BUDGETS)
def test_a_choice_costs_what_its_groups_cost(costs: Costs, budget: int) -> None:
    chosen = choose_groups(costs, budget)
    by_groups = {grouping.groups: grouping for grouping in every_grouping(costs)}
    same = by_groups[chosen.groups]
    assert chosen.bytes == same.bytes
    assert chosen.expected_s == pytest.approx(same.expected_s)
    assert chosen.logged == {group.stop - 1 for group in chosen.groups[:-1]}
    assert all(stage in chosen.group_of(stage) for stage in range(len(costs.stages)))


@given(costs=all_costs())
def test_the_curve_falls_and_nothing_lies_below_it(costs: Costs) -> None:
    curve = tradeoff(costs)
    for smaller, larger in pairwise(curve):
        assert smaller.bytes < larger.bytes
        assert smaller.expected_s > larger.expected_s
    for grouping in every_grouping(costs):
        best = [point for point in curve if point.bytes <= grouping.bytes][-1]
        # The sums are taken in another order there.
        assert best.expected_s <= grouping.expected_s * (1 + 1e-9)


@given(costs=all_costs(), budget=BUDGETS)
def test_a_budget_chooses_the_last_point_of_the_curve_that_fits(costs: Costs, budget: int) -> None:
    assert choose_groups(costs, budget) == [p for p in tradeoff(costs) if p.bytes <= budget][-1]


@given(costs=all_costs(), budgets=st.tuples(BUDGETS, BUDGETS))
def test_more_budget_never_makes_recovery_slower(costs: Costs, budgets: tuple[int, int]) -> None:
    less, more = sorted(budgets)
    assert choose_groups(costs, more).expected_s <= choose_groups(costs, less).expected_s


@given(costs=all_costs())
def test_with_every_boundary_logged_nothing_is_faster(costs: Costs) -> None:
    alone = next(g for g in every_grouping(costs) if len(g.groups) == len(costs.stages))
    assert tradeoff(costs)[-1].expected_s == pytest.approx(alone.expected_s)


@given(costs=all_costs())
def test_a_budget_of_zero_logs_no_byte(costs: Costs) -> None:
    chosen = choose_groups(costs, 0)
    assert chosen.bytes == 0
    if all(boundary.step_bytes for boundary in costs.boundaries):
        assert chosen.groups == (range(len(costs.stages)),)
