"""Files as the writer needs them: aligned writes, syncs, renames. The seam that crash tests record.

Large files bypass the page cache (O_DIRECT) where the file system allows it: the rate is the disk's
own, and a checkpoint pushes nothing out of the cache. Knows nothing of checkpoints.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | memoryview

CHUNK_BYTES = 8 << 20
"""Measured: from 8 MB on, larger writes are not faster."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class OpenFile(Protocol):
    def write(self, data: Bytes, *, at: int) -> None: ...

    def resize(self, size_bytes: int) -> None: ...

    def sync(self) -> None: ...

    def hold(self) -> None:
        """Says that a live process works on this file, until it is closed or the process ends."""

    def close(self) -> None: ...


class Disk(Protocol):
    def create(self, path: Path, *, is_direct: bool = False) -> OpenFile:
        """Direct: data must start on a page, and offsets and lengths must be whole pages."""

    def make_directory(self, path: Path) -> None: ...

    def sync_directory(self, path: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def exchange(self, one: Path, other: Path) -> None:
        """Swaps two directories in one step."""

    def remove(self, path: Path) -> None: ...

    def remove_tree(self, path: Path) -> None: ...


class LocalFile:
    def __init__(self, path: Path, *, is_direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._is_direct = is_direct
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if is_direct else 0), 0o644)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            self._is_direct = False
            self._fd = os.open(path, flags, 0o644)

    def write(self, data: Bytes, *, at: int) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            chunk = view[done : done + CHUNK_BYTES]
            try:
                done += os.pwrite(self._fd, chunk, at + done)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._stop_direct()

    def _stop_direct(self) -> None:
        """Some file systems open with O_DIRECT and then refuse to write, or wrote an odd length."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False

    def resize(self, size_bytes: int) -> None:
        os.ftruncate(self._fd, size_bytes)

    def sync(self) -> None:
        os.fsync(self._fd)

    def hold(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A file system without locks: others then leave the file alone (is_held).
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def close(self) -> None:
        os.close(self._fd)


class LocalDisk:
    def create(self, path: Path, *, is_direct: bool = False) -> OpenFile:
        return LocalFile(path, is_direct=is_direct)

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        paths = os.fsencode(one), os.fsencode(other)
        if library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{os.strerror(code)} (swapping two directories)", str(other))

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def is_held(path: Path) -> bool:
    """Whether a live process works on this file; True when that cannot be told."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """A small file, on disk when this returns; its name is not, until its directory is synced."""
    file = disk.create(path)
    try:
        file.write(data, at=0)
        file.sync()
    finally:
        file.close()
