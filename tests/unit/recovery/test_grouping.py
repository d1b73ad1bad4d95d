from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from everstep.core.errors import ConfigError
from everstep.recovery.grouping import (
    Boundary,
    Costs,
    Grouping,
    StageCost,
    choose_groups,
    recovery_s,
    tradeoff,
)
from everstep.recovery.grouping_picture import render_svg, thin

FOUR = Costs(
    stages=(StageCost(replay_s=8.0),) * 4,
    boundaries=(Boundary(forward_bytes=3, backward_bytes=2),) * 3,
    microbatches=8,
    interval_steps=20,
    helpers=0,
)
"""A micro-batch takes 1 s; 10 steps are replayed on average; a boundary's log has 100 bytes."""


def test_a_stage_alone_is_replayed_without_bubbles() -> None:
    assert recovery_s(FOUR, range(1, 2)) == 10 * 8.0


def test_the_whole_model_goes_back_to_its_checkpoint_as_a_pipeline_with_bubbles() -> None:
    # (8 micro-batches + 3 to fill and drain) of 1 s, as the training step itself.
    assert recovery_s(FOUR, range(4)) == 10 * 11.0


def test_a_group_that_is_slower_than_going_back_goes_back() -> None:
    # One worker would need 16 s for both stages; all four need 11 s for the whole step.
    assert recovery_s(FOUR, range(2)) == 10 * 11.0


def test_helpers_share_the_microbatches_even_if_they_do_not_divide() -> None:
    # 8 micro-batches on 3 workers: 3, 3 and 2.
    assert recovery_s(replace(FOUR, helpers=2), range(1)) == 10 * 3.0


def test_a_group_is_shared_out_by_microbatches() -> None:
    # 4 of 8 micro-batches each, through two stages; then 3, 3 and 2.
    assert recovery_s(replace(FOUR, helpers=1), range(2)) == 10 * 8.0
    assert recovery_s(replace(FOUR, helpers=2), range(2)) == 10 * 6.0


def test_all_others_can_help_up_to_one_for_each_microbatch() -> None:
    assert recovery_s(replace(FOUR, helpers=None), range(2)) == 10 * 4.0
    assert recovery_s(replace(FOUR, helpers=100), range(1)) == 10 * 2.0
    assert recovery_s(replace(FOUR, helpers=100, workers=100), range(1)) == 10 * 1.0


def test_helpers_shorten_neither_the_update_nor_the_loading() -> None:
    stage = StageCost(replay_s=8.0, update_s=0.5, load_s=7.0)
    costs = replace(FOUR, stages=(stage,) * 4, helpers=3)
    assert recovery_s(costs, range(1)) == 7.0 + 10 * (2.0 + 0.5)


def test_without_a_budget_there_is_one_group_and_no_log() -> None:
    grouping = choose_groups(FOUR, 0)
    assert grouping == Grouping(groups=(range(4),), bytes=0, expected_s=110.0)
    assert grouping.logged == frozenset()


def test_one_log_cuts_equal_stages_in_the_middle() -> None:
    grouping = choose_groups(replace(FOUR, helpers=3), 199)
    assert grouping.groups == (range(2), range(2, 4))
    assert grouping.logged == {1}
    assert grouping.bytes == 100
    assert grouping.group_of(2) == range(2, 4)


def test_both_directions_of_a_boundary_count() -> None:
    helped = replace(FOUR, helpers=3)
    assert choose_groups(helped, 99).logged == frozenset()
    assert choose_groups(helped, 100).logged == {1}


def test_a_stage_that_fails_more_often_is_cut_off_first() -> None:
    frail = StageCost(replay_s=8.0, failure_rate=100.0)
    costs = replace(FOUR, stages=(frail, *FOUR.stages[1:]))
    assert choose_groups(costs, 100).groups == (range(1), range(1, 4))


def test_a_log_that_saves_nothing_is_not_kept() -> None:
    never = StageCost(replay_s=8.0, failure_rate=0.0)
    costs = replace(FOUR, stages=(FOUR.stages[0], never, never, never))
    assert choose_groups(costs, 10**9).logged == {0}


def test_only_the_proportions_of_failure_rates_count() -> None:
    rarely = replace(FOUR, stages=(StageCost(replay_s=8.0, failure_rate=1e-9),) * 4)
    assert [g.groups for g in tradeoff(rarely)] == [g.groups for g in tradeoff(FOUR)]


def test_a_single_stage_has_nothing_to_log() -> None:
    alone = replace(FOUR, stages=FOUR.stages[:1], boundaries=())
    assert tradeoff(alone) == (Grouping(groups=(range(1),), bytes=0, expected_s=80.0),)


def test_sixty_four_stages_with_unlike_boundaries_are_no_effort() -> None:
    """There are 2**63 groupings; the frontier of those that count stays short."""
    sizes = [(number * 7919) % 1009 + 1 for number in range(63)]
    costs = replace(
        FOUR,
        stages=FOUR.stages * 16,
        boundaries=tuple(Boundary(forward_bytes=size, backward_bytes=size) for size in sizes),
    )
    grouping = choose_groups(costs, sum(sizes) * 40 // 3)
    assert grouping.bytes == sum(costs.kept_bytes(boundary) for boundary in grouping.logged)


BAD = [
    ({"stages": ()}, "stages is empty: there must be at least one"),
    ({"boundaries": ()}, "boundaries is of length 0: 4 stages have 3 boundaries between them"),
    ({"microbatches": 0}, "microbatches is 0: must be at least 1"),
    ({"interval_steps": 0}, "interval_steps is 0: must be at least 1"),
    ({"workers": 3}, "workers is 3: must be at least 4"),
    ({"helpers": -1}, "helpers is -1: must be at least 0"),
    ({"stages": (StageCost(replay_s=float("nan")),) * 4}, r"stages\[0\].replay_s is nan"),
    ({"stages": (StageCost(replay_s=1, failure_rate=0),) * 4}, "failure_rate is 0 for every stage"),
    (
        {"boundaries": (Boundary(forward_bytes=-1, backward_bytes=0),) * 3},
        r"boundaries\[0\].forward_bytes is -1: must be at least 0",
    ),
]


@pytest.mark.parametrize(("changes", "complaint"), BAD)
def test_costs_that_make_no_sense_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(FOUR, **changes)  # type: ignore[arg-type]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget_bytes is -1: must not be negative"):
        choose_groups(FOUR, -1)


def test_the_picture_has_a_dot_for_each_point_and_a_box_for_each_group() -> None:
    curve = tradeoff(FOUR)
    picture = render_svg(curve, curve[1], budget_bytes=150, title="logs", notes="")
    name = "{http://www.w3.org/2000/svg}"
    tree = ElementTree.fromstring(picture)
    assert len(tree.findall(f"{name}circle")) == len(curve) + 1
    boxes = [box for box in tree.findall(f"{name}rect") if box.get("fill-opacity")]
    assert len(boxes) == sum(len(grouping.groups) for grouping in curve)
    assert picture.count("chosen") == 1
    assert "budget 150 B" in picture


def test_a_picture_can_be_drawn_when_nothing_costs_anything() -> None:
    free = replace(
        FOUR,
        stages=(StageCost(replay_s=0.0),) * 4,
        boundaries=(Boundary(forward_bytes=0, backward_bytes=0),) * 3,
    )
    curve = tradeoff(free)
    ElementTree.fromstring(render_svg(curve, curve[0], budget_bytes=0, title="", notes=""))


def test_a_long_curve_is_thinned_to_its_ends_the_choice_and_some_between() -> None:
    curve = [Grouping(groups=(range(1),), bytes=b, expected_s=100.0 - b) for b in range(100)]
    shown = thin(curve, curve[17], at_most=10)
    assert len(shown) <= 10
    assert {0, 17, 99} <= {grouping.bytes for grouping in shown}
    assert shown == sorted(shown, key=lambda grouping: grouping.bytes)
    assert thin(curve[:10], curve[3], at_most=10) == curve[:10]
