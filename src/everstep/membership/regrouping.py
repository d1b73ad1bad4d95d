"""The books of a change of generation: why it happens, what was lost, what it cost so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.recovering import Recovery, Survivor
from everstep.membership.roster import Worker
from everstep.membership.states import State

LONGEST_REPLACE_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Halting:
    """Every worker is being stopped; then the next generation is formed."""

    since_s: float
    why: str
    redo: m.RollBack | None = None


@dataclass(slots=True, kw_only=True)
class Outage:
    """From the first loss until the first step after it, for the `recovered` event."""

    since_s: float
    lost: list[WorkerId] = field(default_factory=list)
    halted_s: float = 0.0
    formed_s: float = 0.0
    connect_s: float = 0.0
    copy_s: float = 0.0

    def fields(self, *, now_s: float) -> dict[str, object]:
        return {
            "lost": [str(place) for place in self.lost],
            "seconds": now_s - self.since_s,
            "halting": self.halted_s - self.since_s,
            "deciding": self.formed_s - self.halted_s,
            "groups": self.connect_s,
            "state": self.copy_s,
            "redo": now_s - self.formed_s - self.connect_s - self.copy_s,
        }


@dataclass(slots=True)
class Respawn:
    """A worker that is to be started again."""

    number: int
    due_s: float
    wait_s: float

    def later(self, now_s: float) -> Respawn:
        """It failed to start: again, but not at once."""
        wait_s = min(2 * max(self.wait_s, 0.5), LONGEST_REPLACE_WAIT_S)
        return Respawn(self.number, now_s + wait_s, wait_s)


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


def copies_on_the_wire(recovery: Recovery) -> tuple[m.Copy, ...]:
    return tuple(
        m.Copy(copy.target.stage, copy.source.replica, copy.target.replica)
        for copy in recovery.copies
    )
