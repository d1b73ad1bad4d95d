"""Says in words why a log dropped steps and what it still protects, and says it rarely. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_MUCH = 2.0
"""Said again when this many times more, or fewer, steps are protected."""


class Trouble:
    """What was said last; a fresh one when a whole interval went well."""

    def __init__(self) -> None:
        self._said: tuple[str, int] | None = None
        self._has_dropped = False

    def drop(self, kind: str, why: str, *, dropped: int, held: Sequence[int]) -> str | None:
        """The warning, or None when it would say nothing new. `kind`: without numbers.

        Args:
            dropped: the newest step that was dropped.
            held: the steps that are left.
        """
        self._has_dropped = True
        if self._said is not None and not self._is_news(kind, len(held)):
            return None
        self._said = (kind, len(held))
        return (
            f"the log of boundary tensors dropped its steps up to {dropped}: {why}; {_left(held)}"
        )

    def end_interval(self) -> None:
        """A checkpoint made older steps unnecessary. Without a drop since, the trouble is over."""
        if not self._has_dropped:
            self._said = None
        self._has_dropped = False

    def _is_news(self, kind: str, num_held: int) -> bool:
        assert self._said is not None
        said_kind, said = self._said
        more, fewer = max(said, num_held), min(said, num_held)
        return kind != said_kind or more > _MUCH * max(fewer, 1)


def _left(held: Sequence[int]) -> str:
    if not held:
        return "no step is protected until the next checkpoint"
    if len(held) == 1:
        return f"only step {held[0]} is protected now"
    return f"steps {min(held)} to {max(held)} are protected now"
