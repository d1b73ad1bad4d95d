"""Steps: who has which, what a finished one amounts to, and how long things take.

Pure, and knows nothing of how generations change. Invariant: a step is told, and its event
emitted, once, when every live worker has it.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep.core.errors import ProtocolBroken
from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.facts import RollBack
from everstep.membership.ledger import StepSummary, decide_roll_back
from everstep.membership.roster import Worker


class Progress:
    def __init__(self, books: Books) -> None:
        self.began_s = 0.0
        """When the open step was begun."""

        self._books = books

    def record(self, worker: Worker, report: m.StepDone) -> None:
        books = self._books
        if report.generation != books.generation or worker.place is None:
            raise ProtocolBroken(
                f"it finished step {report.step} of generation {report.generation}"
                f" in generation {books.generation}",
                peer=str(worker),
            )
        books.ledger.record(worker.place, report)
        worker.finished_step = report.step

    def is_step_done(self, workers: Iterable[Worker]) -> bool:
        """Whether all hold the open step, and will go on holding it."""
        open_step = self._books.ledger.open_step
        return all(w.finished_step == open_step and not w.is_copying for w in workers)

    def close_step(self, now_s: float) -> RollBack | None:
        """Tells of the open step, which everybody has, and opens the next. Returns what to do when
        its norm was too large."""
        books = self._books
        assert books.job is not None
        step, summary = books.ledger.open_step, books.ledger.summary()
        self._tell(step, summary, now_s)
        redo = decide_roll_back(books.job, step=step, norm=summary.norm)
        if redo is not None:
            books.emit("rollback", step=step, scale=redo.scale, norm=summary.norm)
        books.ledger.close()
        return redo

    def _tell(self, step: int, summary: StepSummary, now_s: float) -> None:
        books = self._books
        if step > books.told_step:
            books.told_step = step
            books.emit(
                "step",
                step=step,
                loss=summary.loss,
                generation=books.generation,
                seconds=now_s - self.began_s,
                metrics=summary.metrics,
                breakdown=summary.breakdown,
            )
        self.began_s = now_s
        books.num_fruitless = 0
        outage = books.outage
        if outage is not None and outage.is_over and books.halting is None:
            books.emit("recovered", step=step, **outage.fields(now_s=now_s))
            books.outage = None

    def profile(self, worker: Worker, message: m.Profile) -> None:
        worker.profile = message.durations
        books = self._books
        if books.halting is not None:
            return  # the next generation measures again
        live = books.members_here()
        profiles = {place: w.profile for place, w in live.items() if w.profile is not None}
        if len(profiles) < len(live) or len({p.stage for p in live}) < books.shape.stages:
            return
        books.plans.measure(profiles)
        for other in live.values():
            other.profile = None
        if books.boundary is None:  # else the next generation is planned with them anyway
            self._replan()

    def _replan(self) -> None:
        """Changes the plan without ending the generation, at a step that nobody can have begun.

        Say the open step is t+1: Watermark(t) is sent, Watermark(t+1) is not. Step t+3 begins
        after a worker's own t+2 is finished, which needs W of t+2, which waits for Watermark(t+1).
        That comes after this Replan on the same ordered connection. So t+3 is safe for all, and
        nothing earlier is: a worker that finished t+1 may be in the middle of t+2.
        """
        books = self._books
        assert books.job is not None
        live = books.members_here()
        books.plans.make(books.job, live)
        from_step = books.ledger.open_step + 2
        fields = {"generation": books.generation, "from_step": from_step}
        books.emit("replanned", **fields, **books.plans.fields(live))
        for place, worker in live.items():
            actions = books.plans.actions_of(place)
            replan = m.Replan(generation=books.generation, from_step=from_step, actions=actions)
            books.send(worker.uid, replan)
