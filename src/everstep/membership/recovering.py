"""What the coordinator asks when workers are lost: from where do the others go on, and how?

The recovery room answers (recovery/decide.py); wiring connects the two. Plain values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from everstep.core.ids import WorkerId
from everstep.membership.roster import Shape


class Rung(StrEnum):
    """The ladder, best first: how a stage gets to the step that all resume from."""

    CONTINUE = "continue"
    """Everyone alive is there already."""

    ROLL_FORWARD = "roll forward"
    """Those behind copy the state of one that finished the step."""

    STEP_BACK = "step back"
    """Those ahead copy the state of one that has not taken the step."""

    UNDO = "undo"
    """All took the step, and take it back."""

    REPLICA = "replica"
    """A new worker copies from a live one."""

    REPLAY = "replay"
    """Nobody holds it: it is run again from its checkpoint, with what its neighbours logged."""

    CHECKPOINT = "checkpoint"
    """All load the newest checkpoint, and run again what came after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A live worker that has halted, or a new one that waits."""

    place: WorkerId
    finished_step: int | None
    """-1 before the first; None when it holds no state."""

    operations: int = 0
    """Evaluations and gatherings it has completed."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """`target` gets the state of `source`, a worker of the same stage."""

    source: WorkerId
    target: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    finished_step: int
    """What every worker will have finished; the next is run in the new generation."""

    rungs: tuple[Rung, ...]
    """Per stage."""

    undo: frozenset[WorkerId]
    copies: tuple[StateCopy, ...]
    operations: int
    """Completed by everybody; later ones are served again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hopeless:
    """A stage's state is gone."""

    stage: int
    reason: str


class Decide(Protocol):
    def __call__(
        self,
        survivors: Sequence[Survivor],
        *,
        shape: Shape,
        open_step: int,
        rebuilt: frozenset[int] = frozenset(),
    ) -> Recovery | Hopeless:
        """`rebuilt`: stages that nobody holds, and that are replayed up to wherever the others
        are."""
