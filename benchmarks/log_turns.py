"""Steps with the log and without that take turns within one run, and what they say of its cost.

Two runs of the same program differ by more than a log costs: where its memory lies, how the machine
is just now. So one run logs some of its steps only, and each turn is held against its neighbours.
A turn is as long as the interval between checkpoints, and they fall into its middle: whatever they
cost, both sides pay it alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median

SETTLED = 1
"""Steps left out at the start of a turn: the first overlaps with the turn before."""


def turn_of(step: int, length: int) -> int:
    return (step + length // 2) // length


def is_logged(step: int, length: int) -> bool:
    return turn_of(step, length) % 2 == 0


def turn_times_s(step_times_s: Mapping[int, float], length: int) -> dict[int, float]:
    """The median step of every turn that is there whole."""
    turns: dict[int, list[float]] = {}
    for step, seconds in sorted(step_times_s.items()):
        turns.setdefault(turn_of(step, length), []).append(seconds)
    return {turn: median(times[SETTLED:]) for turn, times in turns.items() if len(times) == length}


def ratios(turns_s: Mapping[int, float]) -> Iterator[float]:
    """The step with the log over that without, of all neighbouring turns."""
    for (turn, first_s), (after, second_s) in pairwise(sorted(turns_s.items())):
        if after == turn + 1:
            yield first_s / second_s if turn % 2 == 0 else second_s / first_s
