"""Where a log spills to: files that only this process reads, in a directory of its own.

Nothing is synced: a log is of use only while its process lives, and outlives other processes, not
the machine. Files that are removed are written over instead of making new ones. Of a process that
was killed the directory stays behind; the next log that starts on the same host removes it. Knows
nothing of entries.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

_MAX_BUFFERS = 512
"""Buffers given to one system call; the kernel takes at most 1024."""

_WRITE_BYTES = 512 << 10
"""At most, by one system call: it should not keep a processor for long that a training thread may
be waiting for."""

_OWNER = "owner.json"
_PREFIX = "log-"


class LogDisk(Protocol):
    """The seam for tests of full, slow and broken disks."""

    def write(self, path: Path, buffers: Sequence[memoryview], *, at: int) -> None: ...

    def read(self, path: Path, *, at: int, size_bytes: int) -> memoryview:
        """Less than was asked for where the file ends."""

    def remove(self, path: Path) -> None: ...


class LocalLogDisk:
    """For one writer. Writing over a file whose pages are still cached costs a third to a twentieth
    of the processor time that fresh pages do, and what a log forgets at a checkpoint is about what
    it writes until the next: so removed files wait for that, and all together never take more
    than the log once held."""

    def __init__(self) -> None:
        self._spares: list[Path] = []

    def write(self, path: Path, buffers: Sequence[memoryview], *, at: int) -> None:
        if at == 0:
            self._reuse_as(path)
        try:
            _write(path, buffers, at=at)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._spares:
                raise
            self._free_spares()
            _write(path, buffers, at=at)

    def read(self, path: Path, *, at: int, size_bytes: int) -> memoryview:
        found = memoryview(bytearray(size_bytes))
        done = 0
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            while done < size_bytes and (count := file.readinto(found[done:])):
                done += count
        return found[:done]

    def remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            self._spares.append(path.rename(path.with_suffix(".spare")))

    def _reuse_as(self, path: Path) -> None:
        if self._spares and self._spares[-1].parent == path.parent:
            with suppress(FileNotFoundError):  # somebody may have cleaned up under us
                self._spares.pop().rename(path)

    def _free_spares(self) -> None:
        while self._spares:
            self._spares.pop().unlink(missing_ok=True)


def _write(path: Path, buffers: Sequence[memoryview], *, at: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        left = list(buffers)
        while left:
            done = os.pwritev(fd, _first(left), at)
            at += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]
    finally:
        os.close(fd)


def _first(buffers: Sequence[memoryview]) -> list[memoryview]:
    """As much as is written in one go: what they begin with."""
    first: list[memoryview] = []
    room = _WRITE_BYTES
    for buffer in buffers[:_MAX_BUFFERS]:
        if room == 0:
            break
        first.append(buffer[:room])
        room -= len(first[-1])
    return first


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Of a log's directory."""

    host: str
    pid: int
    started: str
    """When, in the kernel's own count: a number that was used again is another process."""

    @property
    def is_known_dead(self) -> bool:
        """False for a process of another host: nobody here can tell."""
        return self.host == socket.gethostname() and _started(self.pid) != self.started


class LogDirectory:
    """`parent`/log-PID-RANDOM, made when it is first needed."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._is_removed = False

    def ensure(self) -> None:
        """Each time: somebody may have cleaned up under us."""
        if (self.path / _OWNER).exists():
            return
        if self._is_removed:
            raise FileNotFoundError(errno.ENOENT, "the log was closed", str(self.path))
        self._parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        owner = Owner(host=socket.gethostname(), pid=os.getpid(), started=_started(os.getpid()))
        fd = os.open(self.path / _OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(owner))

    def remove(self) -> None:
        """For good: a writer that a slow disk held up must not make it again."""
        self._is_removed = True
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_orphans(self) -> None:
        """The logs of processes that are gone. One whose owner cannot be read is left alone: it may
        be in the making."""
        for path in self._siblings():
            with suppress(OSError, msgspec.MsgspecError):
                owner = msgspec.json.decode((path / _OWNER).read_bytes(), type=Owner)
                if owner.is_known_dead:
                    shutil.rmtree(path, ignore_errors=True)

    def _siblings(self) -> list[Path]:
        with suppress(OSError):
            return sorted(self._parent.glob(f"{_PREFIX}*"))
        return []


def _started(pid: int) -> str:
    """Empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name, in brackets, may hold anything; the time is the 20th field after it.
    return stat.rpartition(")")[2].split()[19]
