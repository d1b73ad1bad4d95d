"""What state a worker is in, as the coordinator sees it, and what can happen to it there.

Pure. Every legal move is in TRANSITIONS; `draw` turns the table into the picture in the docs.
"""

from __future__ import annotations

from enum import StrEnum

from everstep.core.errors import IllegalTransition


class State(StrEnum):
    JOINING = "joining"
    """Said Hello; its script is still building the job."""

    STANDBY = "standby"
    """Waits for the next generation: a new worker, or one that halted and kept its state. Who
    reaches an agreed boundary halts without being told."""

    TRAINING = "training"
    SUSPECTED = "suspected"
    """In training, but silent for a while."""

    HALTING = "halting"
    """Told to halt; has not yet said where it stopped."""

    FINISHED = "finished"
    """Did all its steps. Its script may still run; told to halt, it may halt or leave."""

    LEFT = "left"
    """Finished and gone."""

    LOST = "lost"
    """Gone for good. Should it come back to life, it is fenced and must join as new."""


class Happening(StrEnum):
    READY = "ready"
    RESUMED = "resumed"
    SILENT = "silent"
    HEARD = "heard"
    HALT_TOLD = "told to halt"
    HALTED = "halted"
    DONE = "done"
    GONE = "gone"


TRANSITIONS: dict[tuple[State, Happening], State] = {
    (State.JOINING, Happening.READY): State.STANDBY,
    (State.STANDBY, Happening.RESUMED): State.TRAINING,
    (State.TRAINING, Happening.SILENT): State.SUSPECTED,
    (State.SUSPECTED, Happening.HEARD): State.TRAINING,
    (State.TRAINING, Happening.HALT_TOLD): State.HALTING,
    (State.SUSPECTED, Happening.HALT_TOLD): State.HALTING,
    (State.FINISHED, Happening.HALT_TOLD): State.FINISHED,
    (State.HALTING, Happening.HALTED): State.STANDBY,
    (State.TRAINING, Happening.HALTED): State.STANDBY,
    (State.SUSPECTED, Happening.HALTED): State.STANDBY,
    (State.FINISHED, Happening.HALTED): State.STANDBY,
    (State.TRAINING, Happening.DONE): State.FINISHED,
    (State.HALTING, Happening.DONE): State.FINISHED,
    (State.FINISHED, Happening.GONE): State.LEFT,
    (State.JOINING, Happening.GONE): State.LOST,
    (State.STANDBY, Happening.GONE): State.LOST,
    (State.TRAINING, Happening.GONE): State.LOST,
    (State.SUSPECTED, Happening.GONE): State.LOST,
    (State.HALTING, Happening.GONE): State.LOST,
}

GONE_STATES = frozenset({State.LEFT, State.LOST})


def after(state: State, happening: Happening) -> State:
    try:
        return TRANSITIONS[state, happening]
    except KeyError:
        legal = [happening for of_state, happening in TRANSITIONS if of_state is state]
        raise IllegalTransition(state, happening, legal=legal) from None


def draw() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.JOINING}"]
    lines += [f"    {old} --> {new}: {what}" for (old, what), new in TRANSITIONS.items()]
    lines += [f"    {state} --> [*]" for state in State if state in GONE_STATES]
    return "\n".join(lines)
