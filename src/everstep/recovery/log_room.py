"""Keeps a log within its bounds: the oldest steps are dropped whole, and a warning says so.

Knows no tensor, file, thread or lock: whoever calls has the log's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from everstep.recovery.log_book import Held, LogBook
from everstep.recovery.log_trouble import Trouble


class LogRoom(Generic[Held]):
    def __init__(self, book: LogBook[Held], *, memory_bytes: int, budget_bytes: int) -> None:
        self._book = book
        self._memory_bytes = memory_bytes
        self._budget_bytes = budget_bytes
        self._trouble = Trouble()
        self.dropped_steps = 0
        self.dropped_bytes = 0

    @property
    def should_spill(self) -> bool:
        is_over = self._book.memory_bytes > self._memory_bytes
        return is_over and self._book.oldest_step(in_memory=True) is not None

    def keep(self) -> list[str]:
        """Drops what is too much. Returns warnings."""
        # First the quick answer: this is asked with every message that is sent.
        if not (self._is_over_budget() or self._is_over_memory()):
            return []
        warnings = [self._keep_budget(), self._keep_memory()]
        return [warning for warning in warnings if warning is not None]

    def drop_oldest(self, kind: str, why: str) -> list[str]:
        """For a disk that takes no more: this makes room on it, or else at least in memory."""
        oldest = self._book.oldest_step()
        if oldest is None:
            return []
        self._drop_until(oldest)
        warning = self._trouble.drop(kind, why, dropped=oldest, held=self._book.steps)
        return [] if warning is None else [warning]

    def lose(self, entry: str, error: Exception) -> list[str]:
        """For an entry that cannot be kept at all."""
        warning = self._trouble.lose(entry, type(error).__name__, why=str(error))
        return [] if warning is None else [warning]

    def collect(self, durable_step: int) -> None:
        self._book.forget_until(durable_step)
        self._trouble.end_interval()

    def _keep_budget(self) -> str | None:
        return self._drop_while(
            self._is_over_budget,
            kind="budget",
            why=f"its budget of {_size(self._budget_bytes)} is used up",
        )

    def _keep_memory(self) -> str | None:
        """Steps before a gap are of no use, so those on disk go with the one dropped here."""
        waiting, bound = _size(self._book.memory_bytes), _size(self._memory_bytes)
        return self._drop_while(
            self._is_over_memory,
            kind="slow",
            why=f"the disk is too slow ({waiting} are in memory, to be spilled above {bound})",
            in_memory=True,
        )

    def _drop_while(
        self, is_over: Callable[[], bool], *, kind: str, why: str, in_memory: bool = False
    ) -> str | None:
        dropped = None
        while is_over() and (oldest := self._book.oldest_step(in_memory=in_memory)) is not None:
            self._drop_until(oldest)
            dropped = oldest
        if dropped is None:
            return None
        return self._trouble.drop(kind, why, dropped=dropped, held=self._book.steps)

    def _drop_until(self, step: int) -> None:
        held_bytes = self._held_bytes()
        self.dropped_steps += sum(number <= step for number in self._book.steps)
        self._book.forget_until(step)
        self.dropped_bytes += held_bytes - self._held_bytes()

    def _is_over_budget(self) -> bool:
        return self._held_bytes() > self._budget_bytes

    def _is_over_memory(self) -> bool:
        return self._book.memory_bytes > 2 * self._memory_bytes

    def _held_bytes(self) -> int:
        return self._book.memory_bytes + self._book.disk_bytes


def _size(num_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} bytes"
