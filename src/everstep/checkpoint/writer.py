"""The writer: a process of its own session that turns copied states into checkpoints on disk.

It is started by the engine (`python -m everstep.checkpoint.writer FD`), loads no torch, and
outlives the trainer: what was handed over becomes durable, then it ends. Trouble with the disk is
reported and the next job is tried. Invariant: nothing is visible before it is complete.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from everstep.checkpoint.disk import CHUNK_BYTES, Disk, LocalDisk, OpenFile
from everstep.checkpoint.remote_storage import RemoteStorage, is_url
from everstep.checkpoint.shard import ShardWriter
from everstep.checkpoint.storage import LocalStorage, Storage
from everstep.checkpoint.wire import (
    Abandon,
    Attach,
    Begin,
    Committed,
    Failed,
    Hurry,
    Open,
    Order,
    Ready,
    Remove,
    Report,
    SlotFree,
    Wave,
    Wire,
)
from everstep.core.errors import EverstepError

POLL_S = 0.05
"""How often others' parts are looked for while a checkpoint waits for them."""

HURRIED_PATIENCE_S = 2.0
"""How long parts that nobody will begin any more are waited for when nobody is seen writing them:
somebody may just be about to be."""

PROBE_WITHIN_S = 0.25
_TROUBLE = (OSError, EverstepError)


@dataclass(slots=True)
class _Job:
    begin: Begin
    shard: ShardWriter
    file: OpenFile
    started_s: float
    write_s: float = 0.0
    waiting_since_s: float | None = None
    """Set when this part is on disk and those of others are not."""
    is_hurried: bool = False
    """Parts of others that have not been begun never will be."""


@dataclass(slots=True)
class _Slots:
    views: dict[int, memoryview] = field(default_factory=dict)

    def attach(self, slot: int, size_bytes: int, fd: int) -> None:
        memory = mmap.mmap(fd, size_bytes)
        os.close(fd)
        self.views[slot] = memoryview(memory)


class Writer:
    """Takes orders one by one, on one thread; `tell` reports back."""

    def __init__(self, tell: Callable[[Report], None], *, disk: Disk | None = None) -> None:
        self._tell = tell
        self._disk = disk or LocalDisk()
        self._slots = _Slots()
        self._jobs: dict[int, _Job] = {}
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        # File systems take tenths of a second to free a gigabyte: no save waits for that.
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        self._storage: Storage | None = None
        self._patience_s = 0.0
        self._run: str | None = None
        """All others are hurried."""

    def obey(self, order: Order, fd: int | None) -> None:
        match order:
            case Open():
                self._open(order)
            case Attach(slot=slot, size_bytes=size_bytes):
                assert fd is not None, "a slot came without its memory"
                self._slots.attach(slot, size_bytes, fd)
            case Begin():
                self._begin(order)
            case Wave():
                self._wave(order)
            case Abandon(job=number, slot=slot):
                self._drop(number)
                if slot is not None:
                    self._tell(SlotFree(slot=slot))
            case Hurry(run=run):
                self._run = run
                self.hurry(but=run)
            case Remove(steps=steps):
                self._remove(steps)

    def wait_swept(self) -> None:
        """Until what was removed takes no room any more."""
        self._sweeper.submit(lambda: None).result()

    @property
    def is_waiting(self) -> bool:
        return any(job.waiting_since_s is not None for job in self._jobs.values())

    def abandon_unfinished(self) -> None:
        """No order will come: jobs whose last wave has not come never will be whole."""
        for number in [n for n, job in self._jobs.items() if job.waiting_since_s is None]:
            self._drop(number)

    def hurry(self, *, but: str | None = None) -> None:
        """From now on a part is waited for only while somebody writes it. `but`: save for those of
        this run. Said again, it changes nothing."""
        for job in self._jobs.values():
            if not job.is_hurried and job.begin.run != but:
                job.is_hurried = True
                if job.waiting_since_s is not None:
                    job.waiting_since_s = time.monotonic()

    def _open(self, order: Open) -> None:
        self._patience_s = order.patience_s
        self._storage = open_storage(order.directory, disk=self._disk)
        rate = 0.0
        try:
            self._storage.clean()
            rate = probe(self._storage.directory, order.probe_bytes)
        except _TROUBLE:
            pass  # Every job will meet it again, and say so.
        self._tell(Ready(disk_bytes_per_s=rate))

    def _begin(self, begin: Begin) -> None:
        assert self._storage is not None, "no directory was given"
        started_s = time.monotonic()
        try:
            file = self._storage.open_part(begin.step, begin.run, begin.index, of=begin.of)
        except _TROUBLE as error:
            self._tell(Failed(job=begin.job, why=_why(error)))
            return
        shard = ShardWriter(file, begin, beside=self._beside)
        is_hurried = self._run not in (None, begin.run)
        self._jobs[begin.job] = _Job(begin, shard, file, started_s, is_hurried=is_hurried)
        try:
            shard.write_head()
        except _TROUBLE as error:
            self._fail(begin.job, _why(error))

    def _wave(self, wave: Wave) -> None:
        job = self._jobs.get(wave.job)
        try:
            if job is not None:
                slot = self._slots.views[wave.slot][wave.slot_at :]
                job.shard.write(slot, at=wave.at, size_bytes=wave.size_bytes)
        except _TROUBLE as error:
            self._fail(wave.job, _why(error))
        finally:
            if wave.frees_slot:
                self._tell(SlotFree(slot=wave.slot))
        if wave.is_last and wave.job in self._jobs:
            self._finish(wave.job)

    def _finish(self, number: int) -> None:
        job = self._jobs[number]
        assert self._storage is not None
        try:
            self._storage.add_part(job.shard.finish())
        except _TROUBLE as error:
            self._fail(number, _why(error))
            return
        job.write_s = time.monotonic() - job.started_s
        job.waiting_since_s = time.monotonic()
        self.look_for_parts()

    def look_for_parts(self) -> None:
        """Commits what is complete; gives up on what has waited too long."""
        for number in [n for n, job in self._jobs.items() if job.waiting_since_s is not None]:
            self._try_commit(number)

    def _try_commit(self, number: int) -> None:
        job = self._jobs[number]
        assert self._storage is not None
        assert job.waiting_since_s is not None
        begin = job.begin
        try:
            missing = self._storage.try_commit(begin.step, begin.run, of=begin.of)
            saved = () if missing else self._storage.saved()
        except _TROUBLE as error:
            self._fail(number, _why(error))
            return
        if not missing:
            del self._jobs[number]
            job.file.close()
            pairs = tuple((each.step, each.loss) for each in saved)
            self._tell(Committed(job=number, write_s=job.write_s, saved=pairs))
            return
        patience_s = self._patience_s
        if job.is_hurried:
            are_coming = self._storage.are_coming(begin.step, begin.run, missing, of=begin.of)
            if are_coming:
                job.waiting_since_s = time.monotonic()
            elif are_coming is not None:
                patience_s = min(patience_s, HURRIED_PATIENCE_S)
        waited_s = time.monotonic() - job.waiting_since_s
        if waited_s > patience_s:
            names = ", ".join(map(str, missing))
            why = f"parts {names} of {begin.of} have not come within {waited_s:.0f} s"
            self._fail(number, why)

    def fail_all(self, why: str) -> None:
        for number in list(self._jobs):
            self._fail(number, why)

    def _fail(self, number: int, why: str) -> None:
        self._drop(number)
        self._tell(Failed(job=number, why=why))

    def _drop(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is None or self._storage is None:
            return
        job.file.close()
        begin = job.begin
        # If it cannot be removed, it stays a partial: nobody reads it, the next writer removes it.
        with contextlib.suppress(*_TROUBLE):
            self._storage.discard_part(begin.step, begin.run, begin.index, of=begin.of)

    def _remove(self, steps: tuple[int, ...]) -> None:
        assert self._storage is not None
        for step in steps:
            with contextlib.suppress(*_TROUBLE):  # It is asked for again after the next save.
                self._storage.remove(step)
        self._sweeper.submit(self._storage.sweep)


class Reporter:
    """Tells the trainer, as long as there is one."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def __call__(self, report: Report) -> None:
        with contextlib.suppress(OSError):
            self._wire.send(report)


def open_storage(directory: str, *, disk: Disk | None = None) -> Storage:
    if is_url(directory):
        return RemoteStorage(directory, disk=disk)
    return LocalStorage(Path(directory), disk=disk)


def probe(directory: Path, size_bytes: int) -> float:
    """Bytes per second that the disk takes, from one short file."""
    path = directory / f".probe-{os.getpid()}"
    file = LocalDisk().create(path, is_direct=True)
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as pages, memoryview(pages) as chunk:
            started_s, done = time.monotonic(), 0
            while done < size_bytes and time.monotonic() - started_s < PROBE_WITHIN_S:
                file.write(chunk, at=done)
                done += len(chunk)
            file.sync()
            return done / (time.monotonic() - started_s)
    finally:
        file.close()
        path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def serve(wire: Wire, *, trainer_pid: int) -> None:
    """Until the trainer is gone and all it handed over is on disk."""
    orders: queue.SimpleQueue[tuple[Order, int | None] | None] = queue.SimpleQueue()
    # A thread of its own reads, so that the trainer never waits for the disk to say something.
    threading.Thread(target=_listen, args=(wire, orders), daemon=True).start()
    writer = Writer(Reporter(wire))
    while True:
        try:
            item = orders.get(timeout=POLL_S if writer.is_waiting else 1.0)
        except queue.Empty:
            writer.look_for_parts()
            # A forked child of the trainer may hold our connection open: its death shows here too.
            if os.getppid() != trainer_pid:
                break
            continue
        if item is None:
            break
        try:
            writer.obey(*item)
        except Exception as error:  # noqa: BLE001 a bug here costs one checkpoint, not the next
            writer.fail_all(f"{type(error).__name__} in the writer: {error}")
    writer.abandon_unfinished()
    while writer.is_waiting:
        time.sleep(POLL_S)
        if os.getppid() != trainer_pid:
            # The trainers of the other parts may have died with this one, before they began.
            writer.hurry()
        writer.look_for_parts()
    writer.wait_swept()


def _listen(wire: Wire, orders: queue.SimpleQueue[tuple[Order, int | None] | None]) -> None:
    while (item := wire.receive_order()) is not None:
        orders.put(item)
    orders.put(None)


def main() -> None:
    # Whoever stops the trainer must not stop the save; the writer ends by itself when it is done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    serve(Wire(socket.socket(fileno=int(sys.argv[1]))), trainer_pid=int(sys.argv[2]))


if __name__ == "__main__":
    main()
