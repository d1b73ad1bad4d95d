from __future__ import annotations

from everstep.core.ids import WorkerId
from everstep.membership.facts import LogDirection, LogRun
from everstep.recovery.coverage import ReplayRange, Supply, choose_range, describe_gaps, senders

FORWARD, BACKWARD = LogDirection.FORWARD, LogDirection.BACKWARD
Holdings = dict[WorkerId, list[LogRun]]


def logged(*lost: int, num_stages: int = 4) -> Holdings:
    """A pipeline of one replica that logs everything, without the logs of the lost stages."""
    holdings = {}
    for stage in set(range(num_stages)) - set(lost):
        runs = []
        if stage < num_stages - 1:
            runs.append(LogRun(stage, FORWARD, 21, 35, 1, (0, 1)))
        if stage > 0:
            runs.append(LogRun(stage - 1, BACKWARD, 21, 35, 1, (0, 1)))
        holdings[WorkerId(0, stage)] = runs
    return holdings


def choose(*lost: int, holdings: Holdings, num_stages: int = 4) -> tuple[ReplayRange, ...] | None:
    return choose_range(
        lost,
        holdings,
        num_stages=num_stages,
        num_microbatches=2,
        first_step=21,
        last_step=35,
    )


def stages(ranges: tuple[ReplayRange, ...] | None) -> list[tuple[int, int]] | None:
    return None if ranges is None else [(each.first_stage, each.last_stage) for each in ranges]


def test_a_lost_stage_between_full_logs_is_replayed_alone() -> None:
    [chosen] = choose(2, holdings=logged(2)) or ()
    assert (chosen.first_stage, chosen.last_stage) == (2, 2)
    assert chosen.reason == (
        "stage 2: boundary 1 forward and boundary 2 backward are logged for steps 21 to 35"
    )


def test_at_the_ends_of_the_model_one_boundary_is_enough() -> None:
    [first] = choose(0, holdings=logged(0)) or ()
    assert first.reason == "stage 0: boundary 0 backward is logged for steps 21 to 35"
    [last] = choose(3, holdings=logged(3)) or ()
    assert last.reason == "stage 3: boundary 2 forward is logged for steps 21 to 35"


def test_neighbours_lost_together_are_replayed_from_their_outer_boundaries() -> None:
    assert stages(choose(1, 2, holdings=logged(1, 2))) == [(1, 2)]


def test_losses_far_apart_are_two_ranges() -> None:
    lost_two = logged(1, 3, num_stages=6)
    assert stages(choose(1, 3, holdings=lost_two, num_stages=6)) == [(1, 1), (3, 3)]


def test_a_gap_in_the_log_makes_the_range_larger_and_the_reason_says_where() -> None:
    holdings = logged(2)
    holdings[WorkerId(0, 1)] = [
        LogRun(0, BACKWARD, 21, 35, 1, (0, 1)),
        LogRun(1, FORWARD, 21, 30, 1, (0, 1)),
    ]
    [chosen] = choose(2, holdings=holdings) or ()
    assert (chosen.first_stage, chosen.last_stage) == (1, 2)
    assert chosen.reason == (
        "stages 1 to 2: boundary 0 forward and boundary 2 backward are logged for steps 21 to 35;"
        " stage 2 alone cannot: boundary 1 forward is missing steps 31 to 35"
    )


def test_a_micro_batch_that_nobody_holds_is_a_gap() -> None:
    holdings = logged(2)
    holdings[WorkerId(0, 1)] = [
        LogRun(1, FORWARD, 21, 27, 1, (0, 1)),
        LogRun(1, FORWARD, 28, 28, 1, (1,)),
        LogRun(1, FORWARD, 29, 35, 1, (0, 1)),
    ]
    [chosen] = choose(2, holdings=holdings) or ()
    assert chosen.reason.endswith("boundary 1 forward is missing step 28")


def test_nothing_is_chosen_when_it_would_be_the_whole_model() -> None:
    assert choose(1, holdings={}) is None
    assert choose(0, 1, 2, 3, holdings={}) is None
    said = describe_gaps([1], {}, num_stages=4, num_microbatches=2, first_step=21, last_step=35)
    assert said == (
        "stage 1 alone cannot: boundary 0 forward is missing steps 21 to 35"
        " and boundary 1 backward is missing steps 21 to 35"
    )


def test_without_a_loss_or_a_step_to_replay_no_log_is_needed() -> None:
    assert choose(holdings={}) == ()
    chosen = choose_range([1, 2], {}, num_stages=4, num_microbatches=2, first_step=36, last_step=35)
    assert stages(chosen) == [(1, 2)]
    assert chosen is not None
    assert chosen[0].reason == "stages 1 to 2: no step has to be replayed"


def test_many_gaps_are_counted_instead_of_listed() -> None:
    holdings = {
        WorkerId(0, 1): [LogRun(1, FORWARD, step, step, 1, (0, 1)) for step in range(22, 36, 2)]
    }
    said = describe_gaps(
        [2], holdings, num_stages=3, num_microbatches=2, first_step=21, last_step=35
    )
    assert said.endswith("is missing step 21, step 23, step 25 and 5 more gaps")


def supplies(holdings: Holdings, *, num_microbatches: int = 2) -> list[Supply]:
    return senders(
        holdings,
        boundary=1,
        direction=FORWARD,
        first_step=1,
        last_step=9,
        num_microbatches=num_microbatches,
    )


def test_a_stale_attempt_loses_to_a_whole_newer_one_and_wins_against_a_partial_one() -> None:
    one, other = WorkerId(0, 1), WorkerId(1, 1)
    holdings = {
        one: [LogRun(1, FORWARD, 1, 9, 1, (0, 1)), LogRun(1, FORWARD, 4, 6, 2, (0,))],
        other: [LogRun(1, FORWARD, 5, 5, 2, (1,))],
    }
    assert supplies(holdings) == [
        (1, 4, 1, {0: one, 1: one}),
        (5, 5, 2, {0: one, 1: other}),
        (6, 9, 1, {0: one, 1: one}),
    ]


def test_two_halves_of_different_attempts_are_not_a_whole() -> None:
    holdings = {
        WorkerId(0, 1): [LogRun(1, FORWARD, 1, 9, 1, (0,))],
        WorkerId(1, 1): [LogRun(1, FORWARD, 1, 9, 2, (1,))],
    }
    assert supplies(holdings) == []


def test_runs_that_were_told_in_pieces_are_asked_for_as_one() -> None:
    one = WorkerId(0, 1)
    holdings = {one: [LogRun(1, FORWARD, n, n, 1, (0, 1)) for n in range(1, 10)]}
    assert supplies(holdings) == [(1, 9, 1, {0: one, 1: one})]
