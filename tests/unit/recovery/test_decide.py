"""What is decided after typical losses, and the words for it."""

from __future__ import annotations

from everstep.core.ids import WorkerId
from everstep.membership.recovering import Hopeless, Recovery, Rung, StateCopy, Survivor
from everstep.membership.roster import Shape
from everstep.recovery.decide import decide_recovery

GRID = Shape(2, 2)


def decided(steps: dict[tuple[int, int], int | None], *, open_step: int = 7) -> Recovery:
    survivors = [Survivor(place=WorkerId(*p), finished_step=step) for p, step in steps.items()]
    decision = decide_recovery(survivors, shape=GRID, open_step=open_step)
    assert isinstance(decision, Recovery)
    return decision


def test_those_behind_copy_when_every_stage_has_the_step() -> None:
    decision = decided({(0, 0): 7, (1, 0): 6, (0, 1): 7})
    assert decision.finished_step == 7
    assert decision.copies == (StateCopy(WorkerId(0, 0), WorkerId(1, 0)),)
    assert decision.rungs == (Rung.ROLL_FORWARD, Rung.CONTINUE)
    assert decision.reason == "a live worker of every stage finished step 7; 1 copy it"


def test_a_stage_that_is_ahead_as_a_whole_takes_the_step_back() -> None:
    decision = decided({(0, 0): 6, (0, 1): 7, (1, 1): 7})
    assert decision.finished_step == 6
    assert decision.undo == {WorkerId(0, 1), WorkerId(1, 1)}
    assert decision.copies == ()
    assert decision.rungs == (Rung.CONTINUE, Rung.UNDO)
    assert "nobody alive finished step 7 of stage 0" in decision.reason
    assert "2 workers take it back" in decision.reason


def test_one_that_is_ahead_of_its_stage_copies_the_exact_state() -> None:
    """It used to undo, and differed from its peer by rounding errors ever after."""
    decision = decided({(0, 0): 7, (1, 0): 6, (0, 1): 6})
    assert decision.undo == frozenset()
    assert decision.copies == (StateCopy(WorkerId(1, 0), WorkerId(0, 0)),)
    assert decision.rungs == (Rung.STEP_BACK, Rung.CONTINUE)


def test_a_new_worker_copies_from_one_that_takes_a_step_back() -> None:
    decision = decided({(0, 0): 7, (1, 0): None, (0, 1): 6})
    assert decision.undo == {WorkerId(0, 0)}
    assert decision.copies == (StateCopy(WorkerId(0, 0), WorkerId(1, 0)),)
    assert decision.rungs == (Rung.REPLICA, Rung.CONTINUE)


def test_a_step_that_nobody_finished_is_run_next() -> None:
    decision = decided({(0, 0): 6, (1, 0): 6, (0, 1): 6})
    assert decision.reason == "nobody finished step 7; it is run next"
    assert decision.rungs == (Rung.CONTINUE, Rung.CONTINUE)


def test_new_workers_alone_are_no_stage() -> None:
    survivors = [
        Survivor(place=WorkerId(0, 0), finished_step=3),
        Survivor(place=WorkerId(1, 1), finished_step=None),
    ]
    decision = decide_recovery(survivors, shape=GRID, open_step=4)
    assert isinstance(decision, Hopeless)
    assert decision.stage == 1
    assert decision.reason == "stage 1 has live workers (1:1), but none that holds its state"
