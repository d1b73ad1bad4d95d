"""The log of a worker: what it sent over its boundaries, for whoever has to replay a neighbour.

    training   record ---> memory                      a reference, or a copy on a side stream
    writer                   | oldest first, when memory is over its bound
                             v
                            disk, one file per step

Where there is no room, or the disk cannot keep up, the oldest steps are dropped whole, with a
warning: the protected range gets smaller. Training never waits for a file and never hears of an
error. Does not know who asks for entries, or when a checkpoint is durable: it is told.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from torch import Tensor

from everstep.core.errors import ConfigError, LogCorrupt, LogEntryMissing, WaitTimedOut
from everstep.membership.facts import LogRun
from everstep.recovery.log_book import Entry, LogBook, LogKey, Place, runs_of
from everstep.recovery.log_capture import Capture, Capturer, TensorChanged
from everstep.recovery.log_disk import LocalLogDisk, LogDirectory, LogDisk
from everstep.recovery.log_record import RecordBroken, decode_record, encode_record
from everstep.recovery.log_room import LogRoom

__all__ = ["BoundaryLog", "LogKey", "LogReport"]

_BATCH_BYTES = 8 << 20
"""Written at a time: so much memory at most waits for a disk that hangs."""

_JOIN_S = 5.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_Entry: TypeAlias = Entry[Capture]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    memory_bytes: int
    disk_bytes: int
    recorded_bytes: int
    """In all, since the start."""
    dropped_steps: int
    """For want of room; those made unnecessary by a checkpoint do not count."""
    dropped_bytes: int
    oldest_step: int | None
    newest_step: int | None


class BoundaryLog:
    """`on_warning` may be called from any thread, training's too: it should be quick."""

    def __init__(
        self,
        directory: Path,
        *,
        memory_bytes: int,
        budget_bytes: int,
        on_warning: Callable[[str], None],
        disk: LogDisk | None = None,
    ) -> None:
        """
        Args:
            directory: the log's own directory is made in it, once something is spilled.
            memory_bytes: above it the oldest entries are written to disk, above twice as much they
                are dropped.
            budget_bytes: for all that is held, in memory and on disk.
        """
        if memory_bytes < 1 or budget_bytes < 1:
            raise ConfigError(
                "log", (memory_bytes, budget_bytes), "memory and budget need at least one byte"
            )
        self._batch_bytes = min(_BATCH_BYTES, memory_bytes // 4)
        self._on_warning = on_warning
        self._disk = disk or LocalLogDisk()
        self._directory = LogDirectory(directory)
        self._capturer = Capturer()
        self._book: LogBook[Capture] = LogBook()
        self._room = LogRoom(self._book, memory_bytes=memory_bytes, budget_bytes=budget_bytes)
        self._recorded_bytes = 0
        self._is_closed = False
        self._is_writing = False
        self._file_numbers = count()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="everstep log writer", daemon=True)
        self._thread.start()

    def record(
        self, key: LogKey, tensors: Sequence[Tensor], structure: str, *, replace: bool = True
    ) -> None:
        """Keeps what is being sent: do not modify the tensors afterwards. Never waits for the disk.

        Args:
            replace: older attempts of that micro-batch; else whatever is there stays.
        """
        with self._changed:
            if self._is_closed or not self._book.accepts(key, replace=replace):
                return
        try:
            capture = self._capturer.capture(tensors, structure)
        except Exception as error:  # noqa: BLE001 no page-locked memory left, or an odd tensor
            self._lose(key, error)
            return
        with self._changed:
            # Asked again: the step may have been dropped meanwhile.
            if self._is_closed or not self._book.accepts(key, replace=replace):
                return
            self._book.add(Entry(key=key, held=capture, memory_bytes=capture.memory_bytes))
            self._recorded_bytes += capture.num_bytes
            warnings = self._room.keep()
            if self._has_work():
                self._changed.notify_all()
        self._warn(warnings)

    def runs(self) -> tuple[LogRun, ...]:
        """What is held and readable now."""
        with self._changed:
            entries = self._book.entries()
            captures = [entry.held for entry in entries]
        return runs_of(
            entry.key
            for entry, held in zip(entries, captures, strict=True)
            if held is None or held.is_unchanged
        )

    def read(self, key: LogKey) -> tuple[list[Tensor], str]:
        """On the host, not to be modified. An entry found to be damaged is forgotten."""
        with self._changed:
            entry = self._book.find(key)
            if entry is None:
                raise LogEntryMissing(str(key), why=self._why_missing())
            capture, place = entry.held, entry.place
        try:
            if capture is not None:
                return capture.read(), capture.structure
            assert place is not None, "an entry is in memory or on disk"
            return self._read_from_disk(key, place)
        except (OSError, RecordBroken, TensorChanged) as error:
            with self._changed:
                # Not damaged, but collected while it was read: then its file is gone.
                if entry.is_forgotten:
                    raise LogEntryMissing(str(key), why=self._why_missing()) from error
                self._book.forget(entry)
                self._changed.notify_all()
            raise LogCorrupt(str(key), why=str(error)) from error

    def collect(self, durable_step: int) -> None:
        """Forgets all steps up to this one: nobody will have to replay them any more."""
        with self._changed:
            self._room.collect(durable_step)
            self._changed.notify_all()

    def report(self) -> LogReport:
        with self._changed:
            steps = self._book.steps
            return LogReport(
                memory_bytes=self._book.memory_bytes,
                disk_bytes=self._book.disk_bytes,
                recorded_bytes=self._recorded_bytes,
                dropped_steps=self._room.dropped_steps,
                dropped_bytes=self._room.dropped_bytes,
                oldest_step=steps[0] if steps else None,
                newest_step=steps[-1] if steps else None,
            )

    def wait_settled(self, *, timeout_s: float) -> None:
        """Returns when the writer has nothing to do."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._is_closed or not (self._is_writing or self._has_work()), timeout_s
            ):
                raise WaitTimedOut("rest", source="the log's writer", after_s=timeout_s)

    def close(self) -> None:
        """Ends the writer and removes its files."""
        with self._changed:
            self._is_closed = True
            self._book.forget_until(max(self._book.steps, default=0))
            self._changed.notify_all()
        # A disk that hangs may keep it; what it writes then is in a file without a name.
        self._thread.join(_JOIN_S)
        self._directory.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            try:
                self._on_warning(warning)
            except Exception:  # noqa: BLE001 nothing about the log may reach training
                continue

    def _why_missing(self) -> str:
        steps = self._book.steps
        if not steps:
            return "it is empty"
        return f"it holds {len(steps)} steps between {steps[0]} and {steps[-1]}"

    def _read_from_disk(self, key: LogKey, place: Place) -> tuple[list[Tensor], str]:
        record = self._disk.read(place.segment.path, at=place.start, size_bytes=place.size_bytes)
        if len(record) != place.size_bytes:
            raise RecordBroken(f"{len(record)} of {place.size_bytes} bytes are there")
        return decode_record(record, key)

    def _has_work(self) -> bool:
        return self._room.should_spill or self._book.has_gone()

    def _run(self) -> None:
        self._directory.remove_orphans()
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or self._has_work())
                if self._is_closed:
                    return
                self._is_writing = True
                gone = self._book.take_gone()
            for segment in gone:
                # It is no longer counted; at the latest it goes with its directory.
                with suppress(OSError):
                    self._disk.remove(segment.path)
            self._spill()

    def _spill(self) -> None:
        """Writes the oldest entries in memory, or drops the oldest step where that cannot be."""
        path = self._directory.path / f"{next(self._file_numbers)}.segment"
        with self._changed:
            if not self._room.should_spill:
                return
            segment, entries = self._book.begin_writing(limit_bytes=self._batch_bytes, path=path)
            captures = [(entry, entry.held) for entry in entries]
        records = [record for each in captures if (record := self._encode(*each)) is not None]
        try:
            self._directory.ensure()
            parts = [part for record in records for part in record.parts]
            self._disk.write(segment.path, parts, at=segment.size_bytes)
        except Exception as error:  # noqa: BLE001 whatever it is, training goes on
            self._give_up(records, error)
            return
        with self._changed:
            sizes = [(record.entry, record.size_bytes) for record in records]
            self._book.end_writing(segment, sizes)
            for record in records:
                # Asked again: it may have been changed while it was written.
                if not record.capture.is_unchanged:
                    self._book.forget(record.entry)
            warnings = self._room.keep()
        self._warn(warnings)

    def _encode(self, entry: _Entry, capture: Capture | None) -> _Record | None:
        """None for an entry that cannot be kept: it is forgotten, alone."""
        assert capture is not None, "what is being written stays in memory"
        try:
            parts = encode_record(entry.key, capture.read(), capture.structure)
        except Exception as error:  # noqa: BLE001 a changed tensor, or a failed device
            with self._changed:
                self._book.forget(entry)
                self._book.stop_writing(entry)
            self._lose(entry.key, error)
            return None
        return _Record(entry=entry, capture=capture, parts=parts)

    def _give_up(self, records: Sequence[_Record], error: Exception) -> None:
        kind, why = _describe(error)
        with self._changed:
            for record in records:
                self._book.stop_writing(record.entry)
            warnings = self._room.drop_oldest(kind, why)
        self._warn(warnings)

    def _lose(self, key: LogKey, error: Exception) -> None:
        with self._changed:
            warnings = self._room.lose(str(key), error)
        self._warn(warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    entry: _Entry
    capture: Capture
    parts: list[memoryview]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts))


def _describe(error: Exception) -> tuple[str, str]:
    if isinstance(error, OSError) and error.errno in _FULL:
        return "full", f"the disk is full ({error.strerror})"
    if isinstance(error, OSError):
        return "disk", f"the disk cannot be written ({error.strerror or error})"
    return type(error).__name__, f"{type(error).__name__}: {error}"
