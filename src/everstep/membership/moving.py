"""Moves a live worker to a stage that was hit harder, when nobody comes to fill the gap.

Pure. Whether it pays is the schedule room's decision (`normalize`). A move is nothing new to
workers: the process ends, another begins in the new place, and joins with a copy of a peer's state.
Invariant: one move at a time, and none while the lost are going to be replaced.
"""

from __future__ import annotations

from typing import Protocol

from everstep.membership.attendance import Attendance
from everstep.membership.books import Books
from everstep.membership.planning import PlanRequest
from everstep.schedule.normalize import Normalize, Stay


class Normalizer(Protocol):
    def __call__(self, request: PlanRequest, *, horizon_s: float) -> Normalize | Stay:
        """Whether to move workers, for losses that last so long."""


class Moving:
    def __init__(self, books: Books, attendance: Attendance, decide: Normalizer | None) -> None:
        self._books = books
        self._attendance = attendance
        self._decide = decide
        self._considered = 0
        """The last generation that was looked at."""

    def consider(self, now_s: float) -> None:
        """Once in each generation, when it runs by measured durations."""
        books = self._books
        if self._decide is None or books.settings.replace_after_s is not None:
            return
        if self._considered == books.generation or not self._is_settled():
            return
        self._considered = books.generation
        request = books.plans.request
        assert books.job is not None
        assert books.plans.plan is not None
        assert request is not None
        num_left = books.job.steps - books.ledger.open_step
        decision = self._decide(request, horizon_s=num_left * books.plans.plan.period)
        if isinstance(decision, Normalize):
            move = decision.moves[0]
            donor = books.members_here()[move.donor]
            self._attendance.move(donor, move.vacancy, decision.reason, now_s)

    def _is_settled(self) -> bool:
        books = self._books
        is_changing = books.halting is not None or books.boundary is not None
        is_whole = not books.roster.vacancies() or books.has_all_steps()
        is_measured = books.plans.unit == "seconds"
        return not (is_changing or is_whole or books.is_beginning) and is_measured
