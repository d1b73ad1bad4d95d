"""Writes one shard from shared memory: large aligned writes, and checksums beside them.

Checksums are taken on a thread of their own while the disk works, so they cost no time. Bytes come
in waves, in order; a block that lies across two waves is summed across them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from xxhash import xxh3_64, xxh3_64_hexdigest

from everstep.checkpoint.disk import OpenFile
from everstep.checkpoint.image import round_up
from everstep.checkpoint.manifest import (
    BLOCK_BYTES,
    FORMAT,
    PartRecord,
    TensorRecord,
    num_blocks,
    shard_file_name,
)
from everstep.checkpoint.wire import Begin, Tensor


@dataclass(slots=True)
class _Sums:
    """The checksums of one tensor, as far as they are known."""

    tensor: Tensor
    done: list[str] = field(default_factory=list)
    open: xxh3_64 | None = None

    def add(self, data: memoryview, *, first: int) -> None:
        """`data` lies at byte `first` of the tensor, right behind what was added before."""
        while data:
            left = min(BLOCK_BYTES - first % BLOCK_BYTES, self.tensor.size_bytes - first)
            piece, data = data[:left], data[left:]
            first += len(piece)
            if self.open is None and len(piece) == left:
                self.done.append(xxh3_64_hexdigest(piece))
                continue
            self.open = self.open or xxh3_64()
            self.open.update(piece)
            if len(piece) == left:
                self.done.append(self.open.hexdigest())
                self.open = None


class ShardWriter:
    def __init__(self, file: OpenFile, begin: Begin, *, beside: ThreadPoolExecutor) -> None:
        self._file = file
        self._begin = begin
        self._beside = beside
        self._sums = [_Sums(tensor) for tensor in begin.tensors]

    def write_head(self) -> None:
        head = self._begin.head
        with mmap.mmap(-1, len(head)) as pages, memoryview(pages) as aligned:
            aligned[:] = head
            self._file.write(aligned, at=0)

    def write(self, slot: memoryview, *, at: int, size_bytes: int) -> None:
        """The slot's first `size_bytes` are bytes `at ...` of the data section."""
        assert len(slot) >= size_bytes, f"{size_bytes} bytes in a slot of {len(slot)}"
        summing = self._beside.submit(self._sum, slot[:size_bytes], at)
        try:
            # Whole pages: what the last one holds beyond the data is cut off in the end.
            self._file.write(slot[: round_up(size_bytes)], at=len(self._begin.head) + at)
        finally:
            summing.result()

    def _sum(self, data: memoryview, at: int) -> None:
        for sums in self._sums:
            start, end = sums.tensor.start, sums.tensor.start + sums.tensor.size_bytes
            low, high = max(start, at), min(end, at + len(data))
            if low < high:
                sums.add(data[low - at : high - at], first=low - start)

    def finish(self) -> PartRecord:
        """All bytes are on disk when this returns."""
        begin = self._begin
        file_bytes = len(begin.head) + begin.data_bytes
        self._file.resize(file_bytes)
        self._file.sync()
        return PartRecord(
            format=FORMAT,
            step=begin.step,
            run=begin.run,
            index=begin.index,
            of=begin.of,
            file=shard_file_name(begin.index, begin.of),
            file_bytes=file_bytes,
            head_bytes=len(begin.head),
            head_checksum=xxh3_64_hexdigest(begin.head),
            tensors=_records(self._sums, head_bytes=len(begin.head)),
            plain=begin.plain,
            about=begin.about,
        )


def _records(all_sums: Sequence[_Sums], *, head_bytes: int) -> tuple[TensorRecord, ...]:
    records = []
    for sums in all_sums:
        tensor = sums.tensor
        assert len(sums.done) == num_blocks(tensor.size_bytes), f"{tensor.name} came in part"
        records.append(
            TensorRecord(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                start=head_bytes + tensor.start,
                size_bytes=tensor.size_bytes,
                checksums=tuple(sums.done),
                offsets=tensor.offsets,
                whole=tensor.whole,
            )
        )
    return tuple(records)
