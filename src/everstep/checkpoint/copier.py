"""A thread that copies a state into slots while the next forward and backward pass run.

On the processor, tensors are copied in pieces; a trainer that has to wait takes pieces itself. On
a CUDA device the copies run on a side stream, ordered after what the compute stream had queued at
the save; the next update is ordered after them on the device, and no processor waits.

    compute   update k | forward  backward |  update k+1          a state that fits into a slot
    copier             |==== copy ====|    ^ before_update: returns at once

Does not know the writer. Invariant: `released` is set only when no byte of the trainer's tensors is
needed any more.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from everstep.checkpoint.arena import Arena, Slot
from everstep.checkpoint.image import FileImage
from everstep.checkpoint.raw import bytes_of

DeviceEvent: TypeAlias = tuple[torch.device, torch.cuda.Event]

PIECE_BYTES = 16 << 20
"""Large enough that Python does not show, small enough that a waiting trainer finds some left."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `at ... at + size_bytes` of a data section."""

    at: int
    size_bytes: int
    is_last: bool


@dataclass(slots=True, kw_only=True)
class Copy:
    """One state on its way into slots."""

    number: int
    image: FileImage
    tensors: Mapping[str, torch.Tensor]
    first_slot: int
    ready: Sequence[torch.cuda.Event] = ()
    """What the compute streams had queued when the save began."""
    versions: Mapping[str, int] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    copied: list[DeviceEvent] = field(default_factory=list)
    """The copies queued on side streams: the next update comes after them."""
    copy_s: float = 0.0
    """Time spent copying, waits for a slot or a device's queue not counted."""
    _pieces: deque[_Piece] = field(default_factory=deque)
    _num_open: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def lend(self, pieces: Sequence[_Piece]) -> None:
        with self._changed:
            self._pieces.extend(pieces)
            self._num_open += len(pieces)
            self._changed.notify_all()

    def work(self) -> None:
        """Copies pieces until there are none left to take."""
        while True:
            with self._changed:
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
            try:
                piece.copy()
            finally:
                with self._changed:
                    self._num_open -= 1
                    self._changed.notify_all()

    def wait_copied(self) -> None:
        """For pieces that another thread has taken; a memory copy is all that is awaited."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0)

    def wait_released(self, timeout_s: float) -> bool:
        """Helps with the copying meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while not self.released.is_set():
            self.work()
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait_for(lambda: self._pieces or self.released.is_set(), left_s)
        return True

    def release(self) -> None:
        with self._changed:
            self.released.set()
            self._changed.notify_all()


class Receiver(Protocol):
    """Who takes slots that are full. Called on the copier's thread."""

    def next_slot(self) -> int:
        """Waits for a slot; raises SaveFailed."""

    def deliver(self, copy: Copy, slot: Slot, span: Span) -> None: ...

    def failed(self, copy: Copy, why: str) -> None: ...


class SaveFailed(Exception):
    """This save cannot go on; the text says why. Never leaves the engine."""


class Copier:
    def __init__(self, arena: Arena, receiver: Receiver) -> None:
        self._arena = arena
        self._receiver = receiver
        self._queue: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._run, name="checkpoint-copier", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> None:
        self._queue.put(copy)

    def close(self, timeout_s: float) -> bool:
        """Whether all that was submitted is copied, or has failed."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                self._copy(copy)
            except SaveFailed as failed:
                self._receiver.failed(copy, str(failed))
            except Exception as error:  # noqa: BLE001 a failed save must not end training
                self._receiver.failed(copy, f"{type(error).__name__}: {error}")
            finally:
                copy.release()
                copy.tensors = {}

    def _copy(self, copy: Copy) -> None:
        slot_bytes = self._arena.slot_bytes(copy.image.data_bytes)
        number = copy.first_slot
        for span in spans(copy.image.data_bytes, slot_bytes):
            if span.at:
                number = self._receiver.next_slot()
            try:
                slot = self._copy_span(copy, number, span)
            except BaseException:
                self._arena.give_back(number)
                raise
            self._receiver.deliver(copy, slot, span)

    def _copy_span(self, copy: Copy, number: int, span: Span) -> Slot:
        slot = self._arena.memory(number, wanted_bytes=copy.image.data_bytes)
        started_s = time.perf_counter()
        on_device = self._fill(copy, slot, span)
        if span.is_last:
            check_unchanged(copy)
            copy.copied.extend(on_device)
            copy.release()
        for _, event in on_device:
            event.synchronize()
        copy.copy_s += time.perf_counter() - started_s
        return slot

    def _fill(self, copy: Copy, slot: Slot, span: Span) -> list[DeviceEvent]:
        pieces = list(pieces_of(copy, slot, span))
        on_device = [piece for piece in pieces if piece.source.is_cuda]
        events = self._queue_on_device(copy, on_device)
        copy.lend([piece for piece in pieces if not piece.source.is_cuda])
        copy.work()
        copy.wait_copied()
        return events

    def _queue_on_device(self, copy: Copy, pieces: Sequence[_Piece]) -> list[DeviceEvent]:
        events = []
        for device in {piece.source.device for piece in pieces}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            for ready in copy.ready:
                stream.wait_event(ready)
            with torch.cuda.stream(stream):
                for piece in pieces:
                    if piece.source.device == device:
                        piece.copy()
                events.append((device, stream.record_event()))
        return events


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes `first ... first + size_bytes` of a tensor, and where they go in a slot."""

    source: torch.Tensor
    first: int
    size_bytes: int
    target: torch.Tensor

    def copy(self) -> None:
        source = self.source.resolve_conj().resolve_neg().contiguous()
        if source.is_cuda:
            wanted = bytes_of(source)[self.first : self.first + self.size_bytes]
            self.target.copy_(wanted, non_blocking=True)
        else:
            # Not torch's copy: that would wake a second pool of threads beside the trainer's.
            ctypes.memmove(self.target.data_ptr(), source.data_ptr() + self.first, self.size_bytes)


def spans(data_bytes: int, slot_bytes: int) -> Iterator[Span]:
    """The waves of a state: one when it fits into a slot."""
    at = 0
    while True:
        size_bytes = min(slot_bytes, data_bytes - at)
        is_last = at + size_bytes == data_bytes
        yield Span(at, size_bytes, is_last)
        if is_last:
            return
        at += size_bytes


def pieces_of(copy: Copy, slot: Slot, span: Span) -> Iterator[_Piece]:
    for placed in copy.image.placed:
        low = max(placed.start, span.at)
        high = min(placed.start + placed.content.size_bytes, span.at + span.size_bytes)
        source = copy.tensors[placed.content.name]
        # What is not contiguous is made so by each piece: then one piece is best.
        step = PIECE_BYTES if source.is_contiguous() else max(high - low, 1)
        for start in range(low, high, step):
            size_bytes = min(step, high - start)
            target = slot.memory[start - span.at : start - span.at + size_bytes]
            yield _Piece(source, start - placed.start, size_bytes, target)


def versions_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """torch counts the in-place changes of a tensor, save for those of inference tensors."""
    return {name: t._version for name, t in tensors.items() if not t.is_inference()}


def check_unchanged(copy: Copy) -> None:
    """A state that was updated while it was copied is a mix of two steps: never write it."""
    for name, version in copy.versions.items():
        if copy.tensors[name]._version != version:
            raise SaveFailed(
                f"{name} changed while it was copied: call before_update() before the optimizer's"
                " step, and name what forward passes change in FlatState.volatile"
            )
