"""Shared memory that states are copied into: slots, made when first needed, then reused.

A slot mirrors the data section of a shard. It is a memfd: no name, no limit of /dev/shm, gone when
the last process that holds it is. With CUDA it is page-locked, so that the device copies by itself.
Knows nothing of tensors' names. Invariant: a slot is in one hand at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from dataclasses import dataclass

import torch

from everstep.checkpoint.image import round_up
from everstep.core.errors import ConfigError

_PROBE_BYTES = 32 << 20
_SPARE_BYTES = 1 << 20
"""States grow a little (the losses that are kept with them): no reason to make a slot anew."""

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    number: int
    fd: int
    memory: torch.Tensor
    """All its bytes, as uint8."""
    device: torch.device | None
    """That it is page-locked for."""

    @property
    def size_bytes(self) -> int:
        return self.memory.numel()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def close(self) -> None:
        if self.device is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
        os.close(self.fd)


def make_slot(number: int, size_bytes: int, *, device: torch.device | None = None) -> Slot:
    size_bytes = round_up(size_bytes)
    fd = os.memfd_create(f"everstep-slot-{number}")
    os.ftruncate(fd, size_bytes)
    mapped = mmap.mmap(fd, size_bytes)
    # A forked data loader must not get pages that the device writes to.
    mapped.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory.zero_()  # Every page is there before the first copy meets it.
    if device is not None:
        _pin(memory, device)
    return Slot(number=number, fd=fd, memory=memory, device=device)


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    # On that device: a thread begins on device 0, and would make a context there.
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            memory.data_ptr(), memory.numel(), _PORTABLE
        )
    if int(code) != 0:
        raise MemoryError(f"cannot page-lock {memory.numel()} bytes: CUDA error {int(code)}")


class Arena:
    """Two slots by default: a save can start while the one before is being written."""

    def __init__(self, *, num_slots: int = 2, max_slot_bytes: int) -> None:
        if num_slots < 1:
            raise ConfigError("num_slots", num_slots, "a copy needs at least one")
        self._max_slot_bytes = round_up(max_slot_bytes)
        self._slots: dict[int, Slot] = {}
        self._free = set(range(num_slots))
        self._changed = threading.Condition()
        self.copy_bytes_per_s = 0.0
        """Measured on the first slot: what copies are held against."""

    def take(self, *, timeout_s: float = 0.0) -> int | None:
        """The number of a slot nobody uses; None when there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                return None
            number = min(self._free)
            self._free.remove(number)
            return number

    def give_back(self, number: int) -> None:
        with self._changed:
            self._free.add(number)
            self._changed.notify_all()

    def slot_bytes(self, wanted: int) -> int:
        """How large a slot for a state of `wanted` bytes is: more comes in waves."""
        return max(round_up(min(wanted, self._max_slot_bytes)), round_up(1))

    def memory(self, number: int, *, wanted_bytes: int, device: torch.device | None) -> Slot:
        """The memory of a slot that was taken: made when there is none, too little, or when it is
        to be page-locked for `device` and is not."""
        size_bytes = self.slot_bytes(wanted_bytes)
        slot = self._slots.get(number)
        if slot is not None:
            if slot.size_bytes >= size_bytes and (device is None or slot.device is not None):
                return slot
            del self._slots[number]
            slot.close()
        with_spare = min(size_bytes + _SPARE_BYTES, max(size_bytes, self._max_slot_bytes))
        slot = self._slots[number] = make_slot(number, with_spare, device=device)
        if not self.copy_bytes_per_s:
            self.copy_bytes_per_s = measure_copy(slot)
        return slot

    def close(self) -> None:
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()


def measure_copy(slot: Slot) -> float:
    """Bytes per second of a plain copy into a slot, the best of five."""
    target = slot.memory[:_PROBE_BYTES]
    if slot.device is None:
        source = torch.ones(target.numel(), dtype=torch.uint8)
        return target.numel() / min(_seconds_of_copy(target, source) for _ in range(5))
    # On a stream of its own, or it would wait for all that training has queued.
    stream = torch.cuda.Stream(slot.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        source = torch.ones(target.numel(), dtype=torch.uint8, device=slot.device)
        return target.numel() / min(_seconds_of_copy(target, source) for _ in range(5))


def _seconds_of_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    started_s = time.perf_counter()
    if source.is_cuda:
        target.copy_(source)  # Returns when the bytes are there.
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
    return max(time.perf_counter() - started_s, 1e-9)
