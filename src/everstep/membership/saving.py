"""Checkpoints of the live job: which step is saved, and what became of it.

Pure. Knows no disks and no policies: the reporter says when one is due, one worker of each stage
saves its part. A checkpoint that a change of generation cuts off is asked for again.
"""

from __future__ import annotations

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.rebuilding import Rebuilding
from everstep.membership.roster import Worker


class Saving:
    def __init__(self, books: Books, rebuilding: Rebuilding) -> None:
        self._books = books
        self._rebuilding = rebuilding
        self._asked: tuple[int, int] | None = None
        """The generation and the step of the last Save."""

        self._parts: dict[int, dict[WorkerId, m.Saved]] = {}
        self._failed_step: int | None = None

    def wanted(self, message: m.SaveWanted) -> None:
        """The open step: its watermark, with which it is saved, has not been sent to anybody."""
        books = self._books
        if message.generation != books.generation or books.halting is not None:
            return
        step = books.ledger.open_step
        if books.has_all_steps():
            return
        if self._asked is not None and self._asked >= (books.generation, step):
            return
        self._asked = books.generation, step
        for worker in books.members_here().values():
            books.send(worker.uid, m.Save(books.generation, step))

    def saved(self, worker: Worker, message: m.Saved) -> None:
        """A checkpoint is told of when every stage's part is on disk, or one is not."""
        books = self._books
        assert worker.place is not None
        if message.why_not is not None:
            if message.step != self._failed_step:  # else another stage has told of it
                books.emit("checkpoint_failed", step=message.step, why=message.why_not)
                for other in books.members_here().values():
                    books.send(other.uid, m.SaveFailed(message.step))
            self._failed_step = message.step
            self._parts.pop(message.step, None)
            return
        parts = self._parts.setdefault(message.step, {})
        parts[worker.place] = message
        if len({place.stage for place in parts}) < books.shape.stages:
            return
        self._parts = {step: p for step, p in self._parts.items() if step > message.step}
        self._rebuilding.durable(message.step)
        books.emit(
            "checkpoint",
            step=message.step,
            stall_seconds=max(part.stall_s for part in parts.values()),
            durable_seconds=max(part.durable_s for part in parts.values()),
            bytes=sum(part.size_bytes for part in parts.values()),
        )
