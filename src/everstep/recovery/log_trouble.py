"""Says in words why a log dropped steps and what it still protects, and says it rarely. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_MUCH = 2.0
"""Said again when this many times more, or fewer, steps are protected."""


class Trouble:
    """Remembers what was said, until an interval between two checkpoints went well."""

    def __init__(self) -> None:
        self._num_held_when_said: dict[str, int] = {}
        self._is_bad = False

    def drop(self, kind: str, why: str, *, dropped: int, held: Sequence[int]) -> str | None:
        """The warning, or None when it would say nothing new.

        Args:
            kind: the cause, without numbers.
            dropped: the newest step that was dropped.
            held: the steps that are left.
        """
        self._is_bad = True
        said = self._num_held_when_said.get(kind)
        if said is not None and not _is_much_apart(said, len(held)):
            return None
        self._num_held_when_said[kind] = len(held)
        return (
            f"the log of boundary tensors dropped its steps up to {dropped}: {why}; {_left(held)}"
        )

    def lose(self, entry: str, kind: str, *, why: str) -> str | None:
        """One entry that could not be kept at all."""
        self._is_bad = True
        if kind in self._num_held_when_said:
            return None
        self._num_held_when_said[kind] = 1
        return f"the log of boundary tensors cannot keep {entry}: {why}"

    def end_interval(self) -> None:
        """A checkpoint made older steps unnecessary."""
        if not self._is_bad:
            self._num_held_when_said.clear()
        self._is_bad = False


def _is_much_apart(one: int, other: int) -> bool:
    return max(one, other) > _MUCH * max(min(one, other), 1)


def _left(held: Sequence[int]) -> str:
    if not held:
        return "no step is protected until the next checkpoint"
    if len(held) == 1:
        return f"only step {held[0]} is protected now"
    return f"steps {min(held)} to {max(held)} are protected now"
