"""Everybody begins again with the newest checkpoint: at the start of a job, and when a stage's
state is gone.

Pure. The scripts are started again, too, because what they did since the checkpoint will be done
again; the steps they run again are not told twice. Invariant: all begin with the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.ledger import StepLedger
from everstep.membership.recovering import Hopeless
from everstep.membership.replacing import Replacements
from everstep.membership.roster import Worker
from everstep.membership.states import Happening

RESTART_LIMIT = 3
"""Without a new step in between: what ends everybody again and again is no accident."""


class Restart:
    def __init__(self, books: Books, replacements: Replacements) -> None:
        self._books = books
        self._replacements = replacements
        self._told_step: int | None = None
        self._num_fruitless = 0

    def begin(self, decision: Hopeless) -> bool:
        """Starts all workers again; False when there is nothing to begin with, or nobody to start
        them. To be called when nobody trains."""
        books = self._books
        agents = {uid: agent for uid, agent in books.roster.agents.items() if agent.is_here}
        if books.job is None or not books.job.is_saved or not agents or not self._is_of_use():
            return False
        last_step = books.ledger.open_step - 1
        books.emit("restarting", stage=decision.stage, reason=decision.reason, last_step=last_step)
        for worker in books.roster.here():
            worker.move(Happening.GONE)
            books.send(worker.uid, m.Stop(f"{decision.reason}: all are started again", 0))
        for worker in books.roster.workers.values():
            worker.is_of_the_past = True
        self._replacements.forget()
        books.is_beginning = True
        books.num_awaited = sum(len(agent.seats) for agent in agents.values())
        books.members = set()
        books.halting = books.boundary = None
        for uid, agent in agents.items():
            books.send(uid, m.Spawn(agent.seats))
        return True

    def _is_of_use(self) -> bool:
        is_new = self._told_step is None or self._books.told_step > self._told_step
        self._num_fruitless = 0 if is_new else self._num_fruitless + 1
        self._told_step = self._books.told_step
        return self._num_fruitless < RESTART_LIMIT


def restore_newest(books: Books, live: Mapping[WorkerId, Worker]) -> int | None:
    """The newest that all can read becomes what they have finished. None when there is none."""
    found = {place: worker.saved for place, worker in live.items()}
    steps = [step for step in found.values() if step is not None]
    if not steps:
        books.ledger = StepLedger(books.shape.stages)
        return None
    # Who has found none may have looked a moment too soon: the last parts were still being written.
    # It is told to load what the others have found, and says so when it cannot see it.
    step = min(steps)
    books.ledger = StepLedger(books.shape.stages, step + 1)
    books.durable_step = step
    books.emit("restored", step=step)
    for worker in live.values():
        worker.finished_step = worker.owed_restore = step
    return step
