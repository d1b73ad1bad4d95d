"""Named points of the protocol: a worker says when it passes one, and somebody may watch.

Nobody does in ordinary runs, and then a point costs one comparison. Fault scripts watch them
(`everstep.testing.faults`), on the worker's own thread: what a watcher does there, happens there.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

from everstep.core.ids import WorkerId


class Point(StrEnum):
    BEFORE_RECEIVE = "before-receive"
    AFTER_RECEIVE = "after-receive"
    BEFORE_SEND = "before-send"
    AFTER_SEND = "after-send"
    BEFORE_REDUCTION = "before-reduction"
    """All gradients of a bucket are ready; its reduction has not begun."""

    IN_REDUCTION = "in-reduction"
    """This worker has given its share; others may have the sum before it does."""

    AFTER_REDUCTION = "after-reduction"
    BEFORE_OPTIMIZER = "before-optimizer"
    AFTER_OPTIMIZER = "after-optimizer"
    """The step is taken; nobody has been told."""

    HALTED = "halted"
    """Stopped, and about to say so."""

    BEFORE_COPY = "before-copy"
    """On both the source and the target of a state copy."""

    AFTER_COPY = "after-copy"
    BEFORE_GROUPS = "before-groups"
    """About to connect to the peers of a generation."""

    AFTER_GROUPS = "after-groups"
    BEFORE_EVALUATE = "before-evaluate"
    BEFORE_GATHER = "before-gather"


Watcher: TypeAlias = Callable[[WorkerId, Point, int], None]


class _Seam:
    watcher: Watcher | None = None
    place: WorkerId | None = None


_seam = _Seam()


def watch(watcher: Watcher | None) -> None:
    """Calls `watcher` whenever this process passes a point; None to stop."""
    _seam.watcher = watcher


def stand_at(place: WorkerId) -> None:
    """This process works at `place`: a script that watches can know it no sooner."""
    _seam.place = place


def passing(point: Point, *, step: int) -> None:
    """`step`: the one under way, or the last finished one where none is."""
    if _seam.watcher is not None and _seam.place is not None:
        _seam.watcher(_seam.place, point, step)
