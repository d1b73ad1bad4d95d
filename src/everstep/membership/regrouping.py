"""The books of a change of generation: why it happens, what was lost, what it cost so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.facts import Copy, RollBack
from everstep.membership.recovering import Recovery, Survivor
from everstep.membership.roster import Worker
from everstep.membership.states import State

LONGEST_REPLACE_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Halting:
    """Every worker is being stopped; then the next generation is formed."""

    since_s: float
    why: str
    redo: RollBack | None = None


@dataclass(slots=True, kw_only=True)
class Outage:
    """From the first loss until the first step after it, for the `recovered` event."""

    since_s: float
    lost: list[WorkerId] = field(default_factory=list)
    halted_s: float = 0.0
    formed_s: float | None = None
    """None until there is a generation after the loss."""

    resumed_s: float | None = None
    """When the last worker said that it was connected again."""

    connect_s: float = 0.0
    copy_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """With the next step that is finished."""
        return self.formed_s is not None

    def fields(self, *, now_s: float) -> dict[str, object]:
        # The decision and the plan take no time on the clock of a pure function: what is left
        # between the last Halted and the last Resumed is theirs, and the messages'.
        resumed_s = now_s if self.resumed_s is None else self.resumed_s
        deciding_s = resumed_s - self.halted_s - self.connect_s - self.copy_s
        return {
            "lost": [str(place) for place in self.lost],
            "seconds": now_s - self.since_s,
            "halting": self.halted_s - self.since_s,
            "deciding": max(0.0, deciding_s),
            "groups": self.connect_s,
            "state": self.copy_s,
            "redo": now_s - resumed_s,
        }


@dataclass(frozen=True, slots=True)
class Respawn:
    """A worker that is to be started again."""

    number: int
    due_s: float


def respawn_wait_s(wait_s: float, *, num_failed: int) -> float:
    """Doubles with each start that failed."""
    if num_failed == 0:
        return wait_s
    return min(max(wait_s, 0.5) * 2.0**num_failed, LONGEST_REPLACE_WAIT_S)


def is_still_running(worker: Worker) -> bool:
    """Whether the next generation must wait for it to halt."""
    return worker.state in (State.TRAINING, State.SUSPECTED, State.HALTING, State.FINISHED)


def survivors(workers: Iterable[Worker]) -> list[Survivor]:
    return [
        Survivor(
            place=worker.place, finished_step=worker.finished_step, operations=worker.operations
        )
        for worker in workers
        if worker.place is not None
    ]


def copies_on_the_wire(recovery: Recovery) -> tuple[Copy, ...]:
    return tuple(
        Copy(copy.target.stage, copy.source.replica, copy.target.replica)
        for copy in recovery.copies
    )


def as_report(replayed: m.Replayed) -> m.StepDone:
    return m.StepDone(
        generation=replayed.generation,
        step=replayed.step,
        seconds=0.0,
        loss=replayed.loss,
        metrics=replayed.metrics,
        norm_squared=replayed.norm_squared,
    )
