"""Bugs of the decision that were found the hard way."""

from __future__ import annotations

from everstep.core.ids import WorkerId
from everstep.membership.recovering import Recovery, StateCopy, Survivor
from everstep.membership.roster import Shape
from everstep.recovery.decide import decide_recovery


def test_who_takes_a_step_back_copies_a_peer_that_never_took_it() -> None:
    """Two workers of a stage had finished a step and took it back, a third had not finished it.
    Taking back is right to a rounding error only.
    The three went on with different bits; now the two copy the third and undo nothing."""
    survivors = [
        Survivor(place=WorkerId(0, 0), finished_step=6, operations=0),
        Survivor(place=WorkerId(1, 0), finished_step=7, operations=0),
        Survivor(place=WorkerId(2, 0), finished_step=7, operations=0),
        Survivor(place=WorkerId(0, 1), finished_step=6, operations=0),
    ]
    decision = decide_recovery(survivors, shape=Shape(3, 2), open_step=7)
    assert isinstance(decision, Recovery)
    assert decision.undo == frozenset()
    assert decision.copies == (
        StateCopy(WorkerId(0, 0), WorkerId(1, 0)),
        StateCopy(WorkerId(0, 0), WorkerId(2, 0)),
    )
