"""Reads blocks of files straight into tensors, several at once, and checks each while it is warm.

What the page cache holds is taken from there; the rest comes from the disk around it (O_DIRECT), in
parallel: measured, twice as fast as read-ahead, and it pushes nothing out. Threads help although
they are Python's: reading and summing let go of the interpreter. Knows nothing of checkpoints.
Invariant: a block whose checksum does not match is told, never passed.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from xxhash import xxh3_64

from everstep.checkpoint.cached_pages import CachedPages
from everstep.checkpoint.image import PAGE_BYTES
from everstep.checkpoint.manifest import BLOCK_BYTES

_CHUNK_BYTES = 1 << 20
"""Read and summed in one go, so that the sum finds the bytes in the processor's cache."""


_GROUP_BYTES = 4 << 20
"""Less is not worth a thread of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    path: Path
    start: int
    size_bytes: int
    checksum: str
    what: str
    """For the message when it does not match."""
    target: torch.Tensor | None = None
    """Bytes (uint8) on any device; None: only check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBlock:
    path: Path
    why: str


def read_blocks(blocks: Iterable[Block], *, num_threads: int | None = None) -> list[BadBlock]:
    """Those that are not what was written; none: all targets hold what they should."""
    num_threads = num_threads or min(8, 2 * (os.cpu_count() or 1))
    with _Reader() as reader, ThreadPoolExecutor(num_threads) as pool:
        return [bad for found in pool.map(reader.read_all, _groups(blocks)) for bad in found]


def _groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Small ones together: to give a thread its work takes longer than to read a kilobyte."""
    group: list[Block] = []
    size_bytes = 0
    for block in blocks:
        group.append(block)
        size_bytes += block.size_bytes
        if size_bytes >= _GROUP_BYTES:
            yield group
            group, size_bytes = [], 0
    yield group


def describe(bad: Sequence[BadBlock]) -> str:
    """The first problem, and how many more."""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"{bad[0].path.name}: {bad[0].why}{more}"


def _memory_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data


class _File:
    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._pages = CachedPages(self._cached)
        try:
            self._direct: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            self._direct = None

    def is_cached(self, at: int) -> bool:
        return self._pages.hold(at)

    def read(self, chunk: memoryview, at: int, bounce: memoryview, *, is_cached: bool) -> int:
        """How many bytes of `chunk` were filled; `bounce` is aligned, and a page longer.
        `is_cached`: it is worth asking the page cache first."""
        if self._direct is None:
            return os.preadv(self._cached, [chunk], at)
        if is_cached:
            try:
                return os.preadv(self._cached, [chunk], at, os.RWF_NOWAIT)
            except BlockingIOError:
                pass
            except OSError:  # A file system that cannot say what is cached.
                return os.preadv(self._cached, [chunk], at)
        skip = at % PAGE_BYTES
        wanted = -(-(skip + len(chunk)) // PAGE_BYTES) * PAGE_BYTES
        count = os.preadv(self._direct, [bounce[:wanted]], at - skip)
        filled = max(min(count - skip, len(chunk)), 0)
        chunk[:filled] = bounce[skip : skip + filled]
        return filled

    def close(self) -> None:
        self._pages.close()
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)


class _Reader:
    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._opening = threading.Lock()
        self._own = threading.local()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read_all(self, blocks: Sequence[Block]) -> list[BadBlock]:
        return [bad for bad in map(self.read, blocks) if bad is not None]

    def read(self, block: Block) -> BadBlock | None:
        try:
            if block.target is None:
                return self._fill(block, self._scratch("checking", _CHUNK_BYTES))
            if block.target.is_cuda:
                return self._read_to_device(block, block.target)
            return self._fill(block, _memory_of(block.target))
        except OSError as error:
            return BadBlock(path=block.path, why=f"cannot be read: {error.strerror}")

    def _file(self, path: Path) -> _File:
        with self._opening:
            if path not in self._files:
                self._files[path] = _File(path)
            return self._files[path]

    def _scratch(self, name: str, size_bytes: int) -> memoryview:
        """This thread's own aligned memory."""
        if not hasattr(self._own, name):
            setattr(self._own, name, memoryview(mmap.mmap(-1, size_bytes)))
        scratch: memoryview = getattr(self._own, name)
        return scratch

    def _read_to_device(self, block: Block, target: torch.Tensor) -> BadBlock | None:
        if not hasattr(self._own, "staging"):
            with torch.cuda.device(target.device):  # A thread begins on device 0.
                self._own.staging = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._own.stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
        staging = self._own.staging[: block.size_bytes]
        bad = self._fill(block, _memory_of(staging))
        if bad is None:
            with torch.cuda.stream(self._own.stream):
                target.copy_(staging, non_blocking=True)
            self._own.stream.synchronize()
        return bad

    def _fill(self, block: Block, memory: memoryview) -> BadBlock | None:
        """Into `memory`, or over and over through it when it is shorter than the block."""
        file = self._file(block.path)
        bounce = self._scratch("bounce", _CHUNK_BYTES + PAGE_BYTES)
        is_cached = file.is_cached(block.start)
        summed, done = xxh3_64(), 0
        while done < block.size_bytes:
            at = done if len(memory) >= block.size_bytes else 0
            chunk = memory[at : at + min(_CHUNK_BYTES, block.size_bytes - done)]
            count = file.read(chunk, block.start + done, bounce, is_cached=is_cached)
            if count == 0:
                return BadBlock(path=block.path, why=f"{block.what} is cut short")
            summed.update(chunk[:count])
            done += count
        if summed.hexdigest() != block.checksum:
            return BadBlock(path=block.path, why=f"the checksum of {block.what} does not match")
        return None
