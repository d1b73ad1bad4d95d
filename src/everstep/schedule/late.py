"""What makes a timetable miss a shorter period, and what was waited for on the way there.

Usually one or two workers are late, mostly of stage 0, because a few gradients came back late: each
was held up here and there on its way by something less urgent. Knows no priorities.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.schedule.routing import Routes
from everstep.schedule.workload import B, F, W, Workload, stage_windows


@dataclass(frozen=True, slots=True)
class Delay:
    """An operation that could have started at `since` and did not."""

    operation: int
    since: int


def lateness(work: Workload, starts: list[int], *, goal: int) -> int:
    """By how many ticks pieces of W miss a period of `goal`, all of them together. Tells ten late
    workers from one, which the period does not."""
    return sum(
        sum(start - latest for start in starts[stage * 3 + W :: work.stages * 3] if start > latest)
        for stage, latest in _latest_starts(work, starts, goal)
    )


def late_workers(
    work: Workload, routes: Routes, starts: list[int], *, goal: int
) -> list[tuple[int, int]]:
    """(stage, replica) of those that a period of `goal` leaves no time for their last W."""
    return [
        (stage, replica)
        for stage, latest in _latest_starts(work, starts, goal)
        for replica in sorted(
            {
                replica
                for replica, start in zip(
                    routes[stage], starts[stage * 3 + W :: work.stages * 3], strict=True
                )
                if start > latest
            }
        )
    ]


def _latest_starts(work: Workload, starts: list[int], goal: int) -> list[tuple[int, int]]:
    """(stage, the latest start of a W), of the stages whose window is wider than `goal`."""
    found = []
    for stage, (first, end) in enumerate(stage_windows(work, starts)):
        opens = first if work.is_staggered else 0
        if end - opens > goal:
            closes = opens + goal - work.synchronization
            found.append((stage, closes - work.weight_gradient[stage]))
    return found


def jobs_of(routes: Routes, stage: int, replica: int) -> list[int]:
    return [job for job, runs_on in enumerate(routes[stage]) if runs_on == replica]


def after_idling(work: Workload, starts: list[int], operations: list[int]) -> list[int]:
    """Those of one worker's operations that it had to wait for."""
    found = []
    free = 0
    for operation in sorted(operations, key=starts.__getitem__):
        if starts[operation] > free:
            found.append(operation)
        free = starts[operation] + _duration(work, operation)
    return found


def delays(work: Workload, starts: list[int], operation: int) -> list[Delay]:
    """Where the micro-batch was held up until `operation`, an F or a B, the latest place first."""
    found = []
    at: int | None = operation
    while at is not None:
        before = _input_of(work, at)
        since = 0
        if before is not None:
            has_travelled = before % 3 == at % 3
            since = starts[before] + _duration(work, before) + has_travelled * work.transfer
        if starts[at] > since:
            found.append(Delay(at, since))
        at = before
    return found


def _input_of(work: Workload, operation: int) -> int | None:
    place, kind = divmod(operation, 3)
    stage = place % work.stages
    if kind == F:
        return operation - 3 if stage else None
    return operation + 3 if stage + 1 < work.stages else operation - 1


def _duration(work: Workload, operation: int) -> int:
    place, kind = divmod(operation, 3)
    stage = place % work.stages
    if kind == F:
        return work.forward[stage]
    return work.gradient_delay(stage) if kind == B else work.weight_gradient[stage]
