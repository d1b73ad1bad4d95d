"""Decides which stages are replayed from logs, and whom to ask for the entries. Pure.

A range of stages can be replayed when what came into it from outside is logged: the activations at
its left boundary and the input gradients at its right one. Boundary b lies between stages b, b+1:

    stage      0    1    2    3          lost: 2
    boundary     0    1    2             wanted: boundary 1 forward, boundary 2 backward

At the ends of the model nothing comes in. Where the log has a gap, the range grows until its
boundaries have none; stages that were not lost then go back with it.
Invariant: the entries of one step and boundary come from one attempt, never from two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from everstep.core.ids import WorkerId
from everstep.membership.facts import LogDirection, LogRun

Holdings = Mapping[WorkerId, Sequence[LogRun]]
"""What each live worker holds."""

_MAX_GAPS_SAID = 3


class Supply(NamedTuple):
    """Who gives the entries of some steps at one boundary in one direction."""

    first_step: int
    last_step: int
    attempt: int
    holders: dict[int, WorkerId]
    """By micro-batch; all of them are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRange:
    first_stage: int
    last_stage: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    """What must be logged, and by whom it is."""

    holdings: Holdings
    num_stages: int
    num_microbatches: int
    first_step: int
    last_step: int

    def gaps(self, boundary: int, direction: LogDirection) -> list[tuple[int, int]]:
        """The steps, as (first, last), that are not wholly logged there."""
        if not 0 <= boundary < self.num_stages - 1:
            return []
        supplies = senders(
            self.holdings,
            boundary=boundary,
            direction=direction,
            first_step=self.first_step,
            last_step=self.last_step,
            num_microbatches=self.num_microbatches,
        )
        ends = [(self.first_step - 1, self.first_step - 1)]
        ends += [(supply.first_step, supply.last_step) for supply in supplies]
        ends += [(self.last_step + 1, self.last_step + 1)]
        return [
            (before + 1, after - 1)
            for (_, before), (after, _) in pairwise(ends)
            if before + 1 < after
        ]


def choose_range(
    lost_stages: Collection[int],
    holdings: Holdings,
    *,
    num_stages: int,
    num_microbatches: int,
    first_step: int,
    last_step: int,
) -> tuple[ReplayRange, ...] | None:
    """The fewest stages that hold all lost ones and can be replayed from `first_step` to
    `last_step`; among equals, the lower ones. Several ranges never touch.

    None when that is the whole model: then everybody may as well load the checkpoint.

    Args:
        num_microbatches: of the whole step, over all replicas.
    """
    needs = _Needs(
        holdings=holdings,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        first_step=first_step,
        last_step=last_step,
    )
    gaps = cache(needs.gaps)
    ranges = _fewest_stages(
        frozenset(lost_stages),
        num_stages=num_stages,
        can_begin=lambda stage: not gaps(stage - 1, LogDirection.FORWARD),
        can_end=lambda stage: not gaps(stage, LogDirection.BACKWARD),
    )
    if ranges == [(0, num_stages - 1)]:
        return None
    return tuple(
        ReplayRange(
            first_stage=first,
            last_stage=last,
            reason=_reason((first, last), lost_stages, needs=needs),
        )
        for first, last in ranges
    )


def describe_gaps(
    lost_stages: Collection[int],
    holdings: Holdings,
    *,
    num_stages: int,
    num_microbatches: int,
    first_step: int,
    last_step: int,
) -> str:
    """Why the lost stages cannot be replayed alone, in words; empty when they can."""
    needs = _Needs(
        holdings=holdings,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        first_step=first_step,
        last_step=last_step,
    )
    return "; ".join(_obstacles(lost_stages, needs=needs))


def senders(
    holdings: Holdings,
    *,
    boundary: int,
    direction: LogDirection,
    first_step: int,
    last_step: int,
    num_microbatches: int,
) -> list[Supply]:
    """Whom to ask for what, in the order of steps. Steps that nobody holds whole are left out."""
    held = [
        (worker, run)
        for worker in sorted(holdings)
        for run in holdings[worker]
        if run.boundary == boundary and run.direction is direction
    ]
    supplies: list[Supply] = []
    for first, last in _pieces([run for _, run in held], first_step, last_step):
        here = [(worker, run) for worker, run in held if run.first_step <= first <= run.last_step]
        newest = _newest_whole(here, num_microbatches)
        if newest is None:
            continue
        supply = Supply(first, last, *newest)
        if supplies and _continues(supplies[-1], supply):
            supply = supply._replace(first_step=supplies.pop().first_step)
        supplies.append(supply)
    return supplies


def _pieces(runs: Iterable[LogRun], first_step: int, last_step: int) -> Iterator[tuple[int, int]]:
    """The steps, cut wherever a run begins or ends: within a piece, all steps are alike."""
    cuts = {edge for run in runs for edge in (run.first_step, run.last_step + 1)}
    inner = sorted(cut for cut in cuts if first_step < cut <= last_step)
    for first, beyond in pairwise([first_step, *inner, last_step + 1]):
        if first < beyond:
            yield first, beyond - 1


def _newest_whole(
    held: Iterable[tuple[WorkerId, LogRun]], num_microbatches: int
) -> tuple[int, dict[int, WorkerId]] | None:
    """The highest attempt of which every micro-batch is held, and by whom; the first if several."""
    by_attempt: dict[int, dict[int, WorkerId]] = {}
    for worker, run in held:
        holders = by_attempt.setdefault(run.attempt, {})
        for microbatch in run.microbatches:
            if 0 <= microbatch < num_microbatches:
                holders.setdefault(microbatch, worker)
    whole = [attempt for attempt, has in by_attempt.items() if len(has) == num_microbatches]
    if not whole:
        return None
    return max(whole), dict(sorted(by_attempt[max(whole)].items()))


def _continues(before: Supply, after: Supply) -> bool:
    return (
        before.last_step + 1 == after.first_step
        and before.attempt == after.attempt
        and before.holders == after.holders
    )


def _fewest_stages(
    lost: frozenset[int],
    *,
    num_stages: int,
    can_begin: Callable[[int], bool],
    can_end: Callable[[int], bool],
) -> list[tuple[int, int]]:
    """Exact, from the last stage to the first: `best[s]` settles all lost stages from s on."""
    best: list[tuple[int, list[tuple[int, int]]]] = [(0, [])] * (num_stages + 2)
    for first in reversed(range(num_stages)):
        options = [] if first in lost else [best[first + 1]]
        if can_begin(first):
            for last in range(first, num_stages):
                # A range that touches the next one would be one range: it is, with a later end.
                if can_end(last) and last + 1 not in lost:
                    size, others = best[last + 2]
                    options.append((last - first + 1 + size, [(first, last), *others]))
        best[first] = min(options, default=(_NEVER, []))
    return best[0][1]


_NEVER = 1 << 62
"""More stages than any model has: from here on nothing can be settled."""


def _reason(chosen: tuple[int, int], lost_stages: Collection[int], *, needs: _Needs) -> str:
    first, last = chosen
    lost_here = [stage for stage in lost_stages if first <= stage <= last]
    said = [_what_is_logged(first, last, needs=needs)]
    if len(lost_here) < last - first + 1:
        said += _obstacles(lost_here, needs=needs)
    return f"{_stages(first, last)}: {'; '.join(said)}"


def _what_is_logged(first: int, last: int, *, needs: _Needs) -> str:
    if needs.first_step > needs.last_step:
        return "no step has to be replayed"
    sides = []
    if first > 0:
        sides.append(f"boundary {first - 1} forward")
    if last < needs.num_stages - 1:
        sides.append(f"boundary {last} backward")
    verb = "are" if len(sides) == 2 else "is"
    return f"{' and '.join(sides)} {verb} logged for {_steps(needs.first_step, needs.last_step)}"


def _obstacles(lost_stages: Collection[int], *, needs: _Needs) -> list[str]:
    """What keeps each row of neighbouring lost stages from being replayed alone."""
    said = []
    for first, last in _rows(lost_stages):
        missing = [
            f"boundary {boundary} {direction} is missing {_list_gaps(gaps)}"
            for boundary, direction in (
                (first - 1, LogDirection.FORWARD),
                (last, LogDirection.BACKWARD),
            )
            if (gaps := needs.gaps(boundary, direction))
        ]
        if missing:
            said.append(f"{_stages(first, last)} alone cannot: {' and '.join(missing)}")
    return said


def _rows(stages: Collection[int]) -> list[tuple[int, int]]:
    rows: list[tuple[int, int]] = []
    for stage in sorted(set(stages)):
        if rows and rows[-1][1] == stage - 1:
            rows[-1] = (rows[-1][0], stage)
        else:
            rows.append((stage, stage))
    return rows


def _list_gaps(gaps: Sequence[tuple[int, int]]) -> str:
    said = ", ".join(_steps(*gap) for gap in gaps[:_MAX_GAPS_SAID])
    num_more = len(gaps) - _MAX_GAPS_SAID
    return f"{said} and {num_more} more gaps" if num_more > 0 else said


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
