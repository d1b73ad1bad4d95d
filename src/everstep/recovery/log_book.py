"""The index of a log: which entries it holds, where they are, and what is dropped first.

Knows no tensor, file, thread or lock: whoever calls has the log's lock. What an entry has in memory
is opaque here. Invariant: a step is forgotten whole, and what still comes of it in the same attempt
is turned away, so that a step is never held in part because of a lack of room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from everstep.membership.facts import LogDirection, LogRun


@dataclass(frozen=True, slots=True, order=True)
class LogKey:
    """One message that crossed a boundary."""

    step: int
    attempt: int
    """The generation that ran the step."""
    microbatch: int
    """Numbered over the whole step: replica * microbatches + number."""
    boundary: int
    direction: LogDirection

    def __str__(self) -> str:
        return (
            f"step {self.step} (attempt {self.attempt}), micro-batch {self.microbatch},"
            f" boundary {self.boundary} {self.direction}"
        )


Held = TypeVar("Held")
_Slot: TypeAlias = tuple[int, LogDirection, int]


@dataclass(slots=True, eq=False)
class Segment:
    """The file of one step."""

    path: Path
    size_bytes: int = 0
    is_gone: bool = False
    """Its step was forgotten: the file is or will be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    segment: Segment
    start: int
    size_bytes: int


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Generic[Held]):
    """In memory, or on disk, or forgotten (neither matters then)."""

    key: LogKey
    held: Held | None
    memory_bytes: int
    place: Place | None = None
    is_being_written: bool = False
    is_forgotten: bool = False


@dataclass(slots=True, eq=False)
class _Step(Generic[Held]):
    entries: dict[_Slot, Entry[Held]] = field(default_factory=dict)
    in_memory: dict[_Slot, Entry[Held]] = field(default_factory=dict)
    """In the order they came: the order in which they are written."""
    segment: Segment | None = None


class LogBook(Generic[Held]):
    def __init__(self) -> None:
        self._steps: dict[int, _Step[Held]] = {}
        self._closed_step = -1
        self._closed_attempt = -1
        self._newest_attempt = -1
        self._gone: list[Segment] = []
        self.memory_bytes = 0
        """With what is being written, even if it was forgotten meanwhile: it is still there."""
        self.disk_bytes = 0

    @property
    def steps(self) -> list[int]:
        return sorted(self._steps)

    def accepts(self, key: LogKey, *, replace: bool) -> bool:
        if key.step <= self._closed_step and key.attempt <= self._closed_attempt:
            return False
        held = self._find_slot(key)
        return held is None or (replace and held.key.attempt <= key.attempt)

    def add(self, entry: Entry[Held]) -> None:
        """In the place of whatever attempt of that micro-batch was there."""
        key = entry.key
        old = self._find_slot(key)
        if old is not None:
            self.forget(old)
        step = self._steps.setdefault(key.step, _Step())
        step.entries[_slot(key)] = step.in_memory[_slot(key)] = entry
        self.memory_bytes += entry.memory_bytes
        self._newest_attempt = max(self._newest_attempt, key.attempt)

    def find(self, key: LogKey) -> Entry[Held] | None:
        entry = self._find_slot(key)
        return entry if entry is not None and entry.key == key else None

    def entries(self) -> list[Entry[Held]]:
        return [entry for step in self._steps.values() for entry in step.entries.values()]

    def forget(self, entry: Entry[Held]) -> None:
        if entry.is_forgotten:
            return
        step = self._steps[entry.key.step]
        del step.entries[_slot(entry.key)]
        self._release(step, entry)
        entry.is_forgotten = True
        if not step.entries:
            self._forget_step(entry.key.step)

    def forget_until(self, last_step: int) -> None:
        """All steps up to and with this one; what still comes of them is turned away."""
        for number in [number for number in self._steps if number <= last_step]:
            self._forget_step(number)
        # What an earlier attempt closed, a later one that went back may run, and log, again.
        is_later = self._newest_attempt > self._closed_attempt
        self._closed_step = last_step if is_later else max(self._closed_step, last_step)
        self._closed_attempt = self._newest_attempt

    def oldest_step(self, *, in_memory: bool = False) -> int | None:
        steps = self._steps
        return min((n for n in steps if steps[n].in_memory or not in_memory), default=None)

    def begin_writing(self, *, limit_bytes: int, path: Path) -> tuple[Segment, list[Entry[Held]]]:
        """The oldest entries in memory, of one step, and the file they go to: `path` if new."""
        number = self.oldest_step(in_memory=True)
        assert number is not None, "nothing is in memory"
        step = self._steps[number]
        chosen: list[Entry[Held]] = []
        for entry in step.in_memory.values():
            if chosen and sum(e.memory_bytes for e in chosen) + entry.memory_bytes > limit_bytes:
                break
            chosen.append(entry)
        for entry in chosen:
            entry.is_being_written = True
        if step.segment is None:
            step.segment = Segment(path)
        return step.segment, chosen

    def end_writing(self, segment: Segment, sizes_bytes: Iterable[tuple[Entry[Held], int]]) -> None:
        """These were written one after the other to the end of the file."""
        for entry, size_bytes in sizes_bytes:
            place = Place(segment=segment, start=segment.size_bytes, size_bytes=size_bytes)
            segment.size_bytes += size_bytes
            self.stop_writing(entry)
            if not segment.is_gone:
                self.disk_bytes += size_bytes
            if not entry.is_forgotten:
                entry.place = place
                self._release(self._steps[entry.key.step], entry)

    def stop_writing(self, entry: Entry[Held]) -> None:
        """It was not written, or was; if it was forgotten meanwhile, its memory is free now."""
        entry.is_being_written = False
        if entry.is_forgotten:
            self._free(entry)

    def take_gone(self) -> list[Segment]:
        """Files to be removed."""
        gone, self._gone = self._gone, []
        return gone

    def has_gone(self) -> bool:
        return bool(self._gone)

    def _find_slot(self, key: LogKey) -> Entry[Held] | None:
        step = self._steps.get(key.step)
        return None if step is None else step.entries.get(_slot(key))

    def _forget_step(self, number: int) -> None:
        step = self._steps.pop(number)
        for entry in step.entries.values():
            entry.is_forgotten = True
            self._release(step, entry)
        if step.segment is not None:
            step.segment.is_gone = True
            self.disk_bytes -= step.segment.size_bytes
            self._gone.append(step.segment)

    def _release(self, step: _Step[Held], entry: Entry[Held]) -> None:
        if step.in_memory.pop(_slot(entry.key), None) is not None and not entry.is_being_written:
            self._free(entry)

    def _free(self, entry: Entry[Held]) -> None:
        if entry.held is not None:
            entry.held = None
            self.memory_bytes -= entry.memory_bytes


def runs_of(keys: Iterable[LogKey]) -> tuple[LogRun, ...]:
    """The same entries, told compactly."""
    microbatches: dict[tuple[int, LogDirection, int, int], list[int]] = {}
    for key in sorted(keys):
        row = (key.boundary, key.direction, key.attempt, key.step)
        microbatches.setdefault(row, []).append(key.microbatch)
    return tuple(_joined(microbatches))


def _joined(
    microbatches: dict[tuple[int, LogDirection, int, int], list[int]],
) -> Iterator[LogRun]:
    run: LogRun | None = None
    for boundary, direction, attempt, step in sorted(microbatches):
        numbers = tuple(microbatches[boundary, direction, attempt, step])
        first_step = step
        if run is not None:
            if (run.boundary, run.direction, run.attempt) == (boundary, direction, attempt) and (
                run.last_step + 1 == step and run.microbatches == numbers
            ):
                first_step = run.first_step
            else:
                yield run
        run = LogRun(boundary, direction, first_step, step, attempt, numbers)
    if run is not None:
        yield run


def _slot(key: LogKey) -> _Slot:
    return key.boundary, key.direction, key.microbatch
