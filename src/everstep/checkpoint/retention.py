"""Which checkpoints to keep: the last, every so often, the best, or what any of these keeps.

The newest good one is always kept, whatever the rule says: `keeps` is the only way to ask, and adds
it. Checkpoints that are not good are nobody's to keep. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    step: int
    loss: float | None = None
    is_good: bool = True
    """It is complete and verifies."""


class Retention(Protocol):
    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        """The steps, of these, whose checkpoints stay."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    number: int = 2

    def __post_init__(self) -> None:
        _check_positive("KeepLast", self.number)

    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        good = _good(entries)
        return _with_newest(good, [entry.step for entry in good[-self.number :]])


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """The first checkpoint at or after each multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _check_positive("KeepEvery", self.steps)

    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        good = _good(entries)
        # Checkpoints seldom fall on round steps, so the first of each block stands for it.
        first_of_block: dict[int, int] = {}
        for entry in good:
            first_of_block.setdefault(entry.step // self.steps, entry.step)
        return _with_newest(good, first_of_block.values())


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Those with the lowest loss; the newer of two equals. One without a loss is not among them."""

    number: int = 1

    def __post_init__(self) -> None:
        _check_positive("KeepBest", self.number)

    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        good = _good(entries)
        rated = [
            (entry.loss, -entry.step)
            for entry in good
            if entry.loss is not None and not math.isnan(entry.loss)
        ]
        return _with_newest(good, (-step for _, step in sorted(rated)[: self.number]))


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Keeps what any of several rules keeps."""

    rules: tuple[Retention, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise ConfigError("AnyOf.rules", "()", "must name at least one rule")

    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        return set().union(*(rule.keeps(entries) for rule in self.rules))


def removable(entries: Sequence[Entry], retention: Retention) -> list[int]:
    """The good ones that are not kept, oldest first."""
    return sorted({entry.step for entry in _good(entries)} - retention.keeps(entries))


def _good(entries: Iterable[Entry]) -> list[Entry]:
    return sorted((entry for entry in entries if entry.is_good), key=lambda entry: entry.step)


def _with_newest(good: Sequence[Entry], steps: Iterable[int]) -> set[int]:
    newest: Collection[int] = [good[-1].step] if good else []
    return {*steps, *newest}


def _check_positive(rule: str, number: int) -> None:
    if number < 1:
        raise ConfigError(rule, number, "must be at least 1")
