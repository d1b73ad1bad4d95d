"""Cuts the events of a live run into stretches, each from one finished step to the next.

All of a stretch belongs to one kind, so that no time has to be divided: a recovery is what was
thrown away of the step that it interrupted, the pause, and that step again. Knows no system.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from everstep.core.ids import WorkerId
from everstep.sim.trace import Change

Event = Mapping[str, Any]


class Kind(StrEnum):
    STEPS = "steps"
    """Nothing else happened."""

    RECOVERIES = "recoveries"
    """A generation began without somebody, lost or moving to another place."""

    JOINS = "joins"
    """A generation began with somebody new, and nobody was lost."""

    OTHER = "other"
    """A generation began with the same workers: a broken channel, a step taken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    kind: Kind
    seconds: float
    changes: tuple[Change, ...]
    """Their times count from its beginning. New workers come in with their generation, which is
    later than they joined."""


def stretches(events: Sequence[Event], *, num_stages: int) -> Iterator[Stretch]:
    """One for each step of the file but the first."""
    cutter = _Cutter(num_stages=num_stages)
    for event in events:
        match event["event"]:
            case "worker_lost" | "moving":
                cutter.hit(WorkerId(event["replica"], event["stage"]), event["time"])
            case "generation":
                empty = {WorkerId.parse(text, field="lost") for text in event["lost"]}
                cutter.regroup(empty, event["time"])
            case "step":
                found = cutter.cut(event["time"])
                if found is not None:
                    yield found
            case _:
                pass  # nothing that takes a worker away or brings one


@dataclass(slots=True, kw_only=True)
class _Cutter:
    num_stages: int
    _began_s: float | None = None
    _empty: set[WorkerId] = field(default_factory=set)
    """In the newest generation."""

    _hits: dict[WorkerId, float] = field(default_factory=dict)
    """When a place became empty that is in that generation."""

    _changes: list[Change] = field(default_factory=list)
    _has_regrouped: bool = False

    def hit(self, place: WorkerId, time_s: float) -> None:
        if place not in self._empty:
            self._hits[place] = time_s

    def regroup(self, empty: set[WorkerId], time_s: float) -> None:
        lost = self._hits.keys() | (empty - self._empty)
        struck_s = min(self._hits.values(), default=time_s)
        if lost:
            self._note(struck_s, lost=lost)
        if joined := (self._empty | lost) - empty:
            self._note(time_s, joined=joined)
        self._empty, self._hits = empty, {}
        self._has_regrouped = True

    def cut(self, time_s: float) -> Stretch | None:
        """A loss that no generation has followed yet did not undo this step: it strikes the next.
        The coordinator tells of the step when all have halted and are seen to hold it."""
        began_s, self._began_s = self._began_s, time_s
        changes, self._changes = tuple(self._changes), []
        has_regrouped, self._has_regrouped = self._has_regrouped, False
        if began_s is None:
            return None
        return Stretch(
            kind=_kind(changes, has_regrouped=has_regrouped),
            seconds=time_s - began_s,
            changes=changes,
        )

    def _note(
        self, time_s: float, *, lost: Iterable[WorkerId] = (), joined: Iterable[WorkerId] = ()
    ) -> None:
        since_s = 0.0 if self._began_s is None else max(0.0, time_s - self._began_s)
        self._changes.append(
            Change(time_s=since_s, lost=self._numbers(lost), joined=self._numbers(joined))
        )

    def _numbers(self, places: Iterable[WorkerId]) -> tuple[int, ...]:
        return tuple(sorted(place.replica * self.num_stages + place.stage for place in places))


def _kind(changes: Sequence[Change], *, has_regrouped: bool) -> Kind:
    if any(change.lost for change in changes):
        return Kind.RECOVERIES
    if any(change.joined for change in changes):
        return Kind.JOINS
    return Kind.OTHER if has_regrouped else Kind.STEPS
