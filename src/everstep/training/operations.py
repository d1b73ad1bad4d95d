"""What scripts do between steps that all workers take part in: evaluations, gatherings.

Pure bookkeeping. One that somebody was interrupted in, others may have completed: they take part in
it again. So each is kept until the next step. Invariant: nobody is more than one ahead of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Operation:
    number: int
    run: Callable[[], object]


class Operations:
    def __init__(self) -> None:
        self.num_completed = 0
        self.is_operating = False
        self._kept: list[_Operation] = []
        self._again: list[_Operation] = []

    def perform(
        self, operation: Callable[[], Result], how: Callable[[Callable[[], Result]], Result]
    ) -> Result:
        """`how(operation)` runs it until it succeeds."""
        self.is_operating = True
        result = how(operation)
        self.is_operating = False
        self._kept.append(_Operation(self.num_completed, operation))
        self.num_completed += 1
        return result

    def step_done(self) -> None:
        """Everybody has completed them all."""
        self._kept.clear()

    def resume(self, num_completed: int) -> None:
        """Everybody has completed so many; those after them are served again."""
        self._again = [operation for operation in self._kept if operation.number >= num_completed]

    def serve_again(self) -> None:
        while self._again:
            self._again[0].run()
            self._again.pop(0)
