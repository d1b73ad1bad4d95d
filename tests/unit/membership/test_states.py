"""The table of states."""

from __future__ import annotations

import pytest

from everstep.core.errors import IllegalTransition
from everstep.membership.states import GONE_STATES, TRANSITIONS, Happening, State, after, draw


def test_a_training_worker_may_fall_silent_and_come_back() -> None:
    assert after(State.TRAINING, Happening.SILENT) is State.SUSPECTED
    assert after(State.SUSPECTED, Happening.HEARD) is State.TRAINING


def test_an_illegal_move_says_what_would_be_legal() -> None:
    with pytest.raises(IllegalTransition, match=r"'resumed' cannot happen to a joining worker"):
        after(State.JOINING, Happening.RESUMED)


def test_everybody_who_is_here_can_be_gone_and_nobody_returns() -> None:
    for state in State:
        assert ((state, Happening.GONE) in TRANSITIONS) == (state not in GONE_STATES)
    assert not any(state in GONE_STATES for state, _ in TRANSITIONS)


def test_every_state_can_be_reached() -> None:
    assert {State.JOINING, *TRANSITIONS.values()} == set(State)


def test_the_drawing_shows_every_move() -> None:
    picture = draw()
    assert "    halting --> standby: halted" in picture
    assert picture.count("-->") == len(TRANSITIONS) + 3
