"""Which stages are replayed, by whom, from whose logs; and when they are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from everstep.core.ids import WorkerId
from everstep.membership.facts import LogDirection, LogRun, Replay, StageProfile
from everstep.membership.rebuilding import NoReplay, ReplayRequest
from everstep.membership.roster import Shape
from everstep.recovery.rebuild import plan_replay

FORWARD, BACKWARD = LogDirection.FORWARD, LogDirection.BACKWARD
MICROBATCHES = 3


def at(stage: int, replica: int = 0) -> WorkerId:
    return WorkerId(replica, stage)


def logged(
    stage: int,
    *,
    num_stages: int = 4,
    first_step: int = 0,
    last_step: int = 9,
    attempt: int = 1,
    microbatches: Iterable[int] = range(MICROBATCHES),
) -> tuple[LogRun, ...]:
    """What a worker of `stage` sends to both sides."""
    ends = [(stage, FORWARD)] * (stage < num_stages - 1) + [(stage - 1, BACKWARD)] * (stage > 0)
    numbers = tuple(microbatches)
    return tuple(LogRun(b, d, first_step, last_step, attempt, numbers) for b, d in ends)


def request(lost: Iterable[int], **changes: Any) -> ReplayRequest:
    """One replica of four stages, which have logged everything."""
    stages = frozenset(lost)
    facts: dict[str, Any] = {
        "shape": Shape(1, 4),
        "microbatches": MICROBATCHES,
        "lost_stages": stages,
        "new": tuple(at(stage) for stage in sorted(stages)),
        "holdings": {at(stage): logged(stage) for stage in range(4) if stage not in stages},
        "checkpoint": -1,
        "last_step": 9,
        "helpers": None,
        "durations": None,
        "period_s": None,
    }
    return ReplayRequest(**(facts | changes))


HOLDINGS_OF_TWO = {at(stage): logged(stage, microbatches=range(2)) for stage in (0, 2, 3)}


def planned(request: ReplayRequest) -> tuple[Replay, ...]:
    replays = plan_replay(request)
    assert not isinstance(replays, NoReplay), replays.reason
    return replays


def test_one_stage_is_replayed_from_its_neighbours_logs() -> None:
    (replay,) = planned(request([1]))
    assert (replay.first_stage, replay.last_stage) == (1, 1)
    assert (replay.checkpoint, replay.last_step) == (-1, 9)
    assert replay.rebuilt == (at(1),)
    assert [(s.boundary, s.direction, s.holders) for s in replay.sources] == [
        (0, FORWARD, (at(0),) * 3),
        (1, BACKWARD, (at(2),) * 3),
    ]


@pytest.mark.parametrize(("stage", "sides"), [(0, [(0, BACKWARD)]), (3, [(2, FORWARD)])])
def test_at_the_ends_of_the_model_only_one_side_is_needed(
    stage: int, sides: list[tuple[int, LogDirection]]
) -> None:
    (replay,) = planned(request([stage]))
    assert [(source.boundary, source.direction) for source in replay.sources] == sides


def test_neighbours_are_one_range_and_others_are_two() -> None:
    ranges = [(r.first_stage, r.last_stage) for r in planned(request([1, 2]))]
    assert ranges == [(1, 2)]
    ranges = [(r.first_stage, r.last_stage) for r in planned(request([0, 2]))]
    assert ranges == [(0, 0), (2, 2)]


def test_a_gap_in_a_neighbours_log_takes_the_neighbour_in() -> None:
    """Its own state stays as it is: it is not among those rebuilt."""
    holdings = {at(0): logged(0, first_step=4), at(2): logged(2), at(3): logged(3)}
    (replay,) = planned(request([1], holdings=holdings))
    assert (replay.first_stage, replay.last_stage) == (0, 1)
    assert replay.rebuilt == (at(1),)


def test_the_gap_does_not_matter_when_a_later_checkpoint_covers_it() -> None:
    holdings = {at(0): logged(0, first_step=4), at(2): logged(2), at(3): logged(3)}
    (replay,) = planned(request([1], holdings=holdings, checkpoint=3))
    assert (replay.first_stage, replay.last_stage) == (1, 1)
    assert {source.first_step for source in replay.sources} == {4}


def test_when_the_whole_model_would_be_replayed_the_reason_is_said() -> None:
    holdings = {at(0): (), at(2): (), at(3): ()}
    refused = plan_replay(request([1], holdings=holdings))
    assert refused == NoReplay(
        "stage 1 alone cannot: boundary 0 forward is missing steps 0 to 9"
        " and boundary 1 backward is missing steps 0 to 9"
    )


def test_a_step_that_was_run_again_is_taken_from_its_last_attempt() -> None:
    """And never half from one and half from the other."""
    first = logged(0, last_step=6, attempt=1)
    partly = logged(0, first_step=6, last_step=6, attempt=2, microbatches=(0, 1))
    later = logged(0, first_step=6, attempt=3)
    holdings = {at(0): first + partly + later, at(2): logged(2), at(3): logged(3)}
    (replay,) = planned(request([1], holdings=holdings))
    forward = [s for s in replay.sources if s.direction is FORWARD]
    assert [(s.first_step, s.last_step, s.attempt) for s in forward] == [(0, 5, 1), (6, 9, 3)]


def test_what_helpers_logged_of_another_replay_is_found_with_each_of_them() -> None:
    """Stage 1 was rebuilt by three, each of which logged its share; stage 2 is lost now."""
    shares = {
        at(0): logged(0) + logged(1, last_step=6, attempt=2, microbatches=(1,)),
        at(1): logged(1, last_step=6, attempt=2, microbatches=(0,))
        + logged(1, first_step=7, attempt=2),
        at(3): logged(3) + logged(1, last_step=6, attempt=2, microbatches=(2,)),
    }
    (replay,) = planned(request([2], holdings=shares))
    forward = [s for s in replay.sources if s.direction is FORWARD]
    assert [(s.first_step, s.last_step, s.holders) for s in forward] == [
        (0, 6, (at(1), at(0), at(3))),
        (7, 9, (at(1), at(1), at(1))),
    ]


@pytest.mark.parametrize(
    ("helpers", "replayers", "is_shared"),
    [
        (0, (at(1),), False),
        (1, (at(1), at(3)), True),
        (None, (at(1), at(3), at(0)), True),
    ],
)
def test_helpers_are_no_more_than_allowed_and_than_there_is_work_for(
    helpers: int | None, replayers: tuple[WorkerId, ...], is_shared: bool
) -> None:
    (replay,) = planned(request([1], helpers=helpers))
    assert (replay.replayers, replay.is_shared) == (replayers, is_shared)


def test_neighbours_help_last_because_they_are_busy_giving_their_logs() -> None:
    """Found live: stage 2 helped to rebuild stage 1, and logged a third of what stage 1 had sent to
    it. When it was lost next, that third was gone, and stage 1 had to be replayed as well. Since
    then a stage's own worker logs all of it."""
    (replay,) = planned(request([1]))
    assert at(2) not in replay.replayers
    (replay,) = planned(request([1], microbatches=2, holdings=HOLDINGS_OF_TWO))
    assert replay.replayers == (at(1), at(3))


def test_without_helpers_both_of_two_lost_neighbours_run_everything() -> None:
    (replay,) = planned(request([1, 2], helpers=0))
    assert (replay.replayers, replay.is_shared) == ((at(1), at(2)), False)


def test_more_new_workers_than_micro_batches_share_nothing() -> None:
    """Regression: three lost stages and two micro-batches. The third replayer had no micro-batch of
    any step, brought no gradient to the sums of the others, and the replay fell over."""
    numbers = range(2)
    holdings = {at(3): logged(3, microbatches=numbers)}
    (replay,) = planned(request([0, 1, 2], holdings=holdings, microbatches=2))
    assert replay.replayers == (at(0), at(1), at(2))
    assert not replay.is_shared


def test_scales_come_from_one_who_has_seen_every_step() -> None:
    """Regression: with replicas, 0:0 had copied its state from 1:0 after step 4, so it knew of no
    clipping before. It was asked, being the first; the replay then left those steps unclipped."""
    holdings = {
        at(0, 0): logged(0, num_stages=2, first_step=5, microbatches=range(3)),
        at(0, 1): logged(0, num_stages=2, last_step=4, microbatches=range(6))
        + logged(0, num_stages=2, first_step=5, microbatches=range(3, 6)),
    }
    new = (at(1, 0), at(1, 1))
    (replay,) = planned(request([1], shape=Shape(2, 2), new=new, holdings=holdings))
    assert replay.scales_from == at(0, 1)


def test_right_after_a_checkpoint_there_is_nothing_to_replay_but_to_load() -> None:
    (replay,) = planned(request([1], checkpoint=9))
    assert replay.sources == ()
    assert replay.scales_from == at(0)


SLOW = StageProfile(
    forward=1.0,
    input_gradient=1.0,
    weight_gradient=1.0,
    transfer=0.0,
    reduction=0.0,
    optimizer=0.5,
)


def test_a_replay_that_takes_longer_than_all_stages_together_is_not_worth_it() -> None:
    """Two of four stages, three micro-batches, one worker: 3 * 2 * 3 s and two optimizer steps."""
    measured: dict[str, Any] = {"durations": (SLOW,) * 4, "helpers": 0}
    assert planned(request([1, 2], **measured, period_s=19.0))
    refused = plan_replay(request([1, 2], **measured, period_s=18.9))
    assert refused == NoReplay(
        "replaying 2 stages would take 19 s for each step, and all stages together take 18.9 s"
    )


def test_helpers_make_it_worth_it() -> None:
    """Three share three micro-batches: one round of 2 * 3 s."""
    assert planned(request([1, 2], durations=(SLOW,) * 4, period_s=7.0))
