"""Starting lost workers again, a while after their loss, on an agent that is there. Pure."""

from __future__ import annotations

from collections import Counter

from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.facts import Seat
from everstep.membership.regrouping import Respawn, respawn_wait_s


class Replacements:
    def __init__(self, books: Books) -> None:
        self._books = books
        self._due: list[Respawn] = []
        self._num_failed: Counter[int] = Counter()
        self._moving: set[int] = set()
        self._starting: set[int] = set()
        """Told to an agent, and neither joined nor failed yet."""

    def move(self, number: int, now_s: float) -> None:
        """It is started again at once, whatever happens to those that are lost."""
        self._moving.add(number)
        self.plan(number, now_s)
        self.start_due(now_s)

    def plan(self, number: int, now_s: float) -> bool:
        """Whether a worker will be started in the place of a lost one."""
        wait_s = 0.0 if number in self._moving else self._books.settings.replace_after_s
        if wait_s is None or self._books.roster.agent_of(number) is None:
            return False
        if any(respawn.number == number for respawn in self._due):
            return True
        wait_s = respawn_wait_s(wait_s, num_failed=self._num_failed[number])
        self._due.append(Respawn(number, now_s + wait_s))
        return True

    def failed(self, number: int, now_s: float) -> None:
        """It ended before it joined: again, but not so soon."""
        self._num_failed[number] += 1
        self._starting.discard(number)
        self.plan(number, now_s)

    def joined(self, number: int) -> None:
        del self._num_failed[number]
        self._moving.discard(number)
        self._starting.discard(number)

    def hurry(self, now_s: float) -> bool:
        """Everybody waits for those who were to be started later; whether anybody will come."""
        self._due = [Respawn(r.number, min(r.due_s, now_s)) for r in self._due]
        self.start_due(now_s)
        return bool(self._starting)

    def forget(self) -> None:
        """All are started anyway."""
        self._due.clear()
        self._starting.clear()

    def start_due(self, now_s: float) -> None:
        due = [respawn.number for respawn in self._due if respawn.due_s <= now_s]
        self._due = [respawn for respawn in self._due if respawn.due_s > now_s]
        for number in due:
            if self._books.roster.vacancies():
                self._start(number)

    def _start(self, number: int) -> None:
        books = self._books
        agent = books.roster.agent_of(number)
        if agent is not None:
            seat = Seat(number, str(books.shape.place(number)))
            books.send(agent, m.Spawn((seat,)))
            self._starting.add(number)
        elif books.is_beginning:
            books.fail(
                f"worker number {number} is lost before training began, and no agent is left to"
                " start it again"
            )
