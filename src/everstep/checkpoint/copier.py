"""A thread that copies a state into slots while the next forward and backward pass run.

On the processor, a trainer that has to wait for the copy takes a share of it. On a CUDA device the
copies run on a side stream, ordered after what the compute stream had queued at the save; the next
update is ordered after them on the device, and no processor waits.

    compute   update k | forward  backward |  update k+1          a state that fits into a slot
    copier             |==== copy ====|    ^ before_update: returns at once

Does not know the writer. Invariant: `released` is set only when no byte of the trainer's tensors is
needed any more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from everstep.checkpoint.arena import Arena, Slot
from everstep.checkpoint.image import FileImage
from everstep.checkpoint.pieces import Piece, Portion, batches_of, pieces_of, waves
from everstep.checkpoint.raw import device_of

DeviceEvent: TypeAlias = tuple[torch.device, torch.cuda.Event]


class SaveFailed(Exception):
    """This save cannot go on; the text says why. Never leaves the engine."""


@dataclass(slots=True, kw_only=True)
class Copy:
    """One state on its way into slots."""

    number: int
    image: FileImage
    tensors: Mapping[str, torch.Tensor]
    own_slot: int | None
    """A slot that was taken and nobody was given yet."""
    ready: Sequence[torch.cuda.Event] = ()
    """What the compute streams had queued when the save began."""
    versions: Mapping[str, int] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    copied: list[DeviceEvent] = field(default_factory=list)
    """The copies queued on side streams: the next update comes after them."""
    copy_s: float = 0.0
    """Time spent copying, waits for a slot not counted."""
    _batches: deque[tuple[int, Sequence[Piece]]] = field(default_factory=deque)
    """What nobody has taken yet, each with the number of its portion in the wave."""
    _num_open: list[int] = field(default_factory=list)
    """Batches of each portion that are not copied yet."""
    _ends_with: Callable[[], None] | None = None
    _error: Exception | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def lend(
        self, portions: Sequence[Sequence[Piece]], *, ends_with: Callable[[], None] | None = None
    ) -> None:
        """Gives the pieces to whoever works; `ends_with` is called by who copies the last one."""
        batches = [batches_of(pieces) for pieces in portions]
        with self._changed:
            self._num_open = [len(each) for each in batches]
            self._batches.extend((n, batch) for n, each in enumerate(batches) for batch in each)
            self._ends_with = ends_with
            self._changed.notify_all()

    def wait_copied(self, portion: int) -> None:
        """Works until this portion is copied; what the trainer has taken of it is awaited."""
        while self._num_open[portion]:
            if not self._work():
                with self._changed:
                    self._changed.wait_for(lambda: self._num_open[portion] == 0)
        if self._error is not None:
            raise self._error

    def _work(self, *, has_pool: bool = False) -> bool:
        """Copies one batch; False when there is none to take."""
        with self._changed:
            if not self._batches:
                return False
            portion, batch = self._batches.popleft()
        try:
            for piece in batch:
                piece.copy(has_pool=has_pool)
        except Exception as error:  # noqa: BLE001 raised again on the copier's thread
            self._error = error
        with self._changed:
            if sum(self._num_open) == 1 and self._ends_with and self._error is None:
                self._end(self._ends_with)
            self._num_open[portion] -= 1
            self._changed.notify_all()
        return True

    def _end(self, ends_with: Callable[[], None]) -> None:
        try:
            ends_with()
        except SaveFailed as failed:
            self._error = failed

    def wait_released(self, timeout_s: float) -> bool:
        """Called by the trainer, who helps meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        while not self.released.is_set():
            if self._work(has_pool=True):
                continue
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait_for(lambda: self._batches or self.released.is_set(), left_s)
        return True

    def release(self) -> None:
        with self._changed:
            self.released.set()
            self._changed.notify_all()


class Receiver(Protocol):
    """Who takes what was copied. Called on the copier's thread."""

    def next_slot(self) -> int:
        """Waits for a slot; raises SaveFailed."""

    def deliver(self, copy: Copy, slot: Slot, portion: Portion) -> None:
        """The slot is the receiver's from now on; raises SaveFailed."""

    def failed(self, copy: Copy, why: str) -> None: ...


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
                if copy.own_slot is not None:
                    self._arena.give_back(copy.own_slot)
                copy.release()
                copy.tensors = {}

    def _copy(self, copy: Copy) -> None:
        data_bytes = copy.image.data_bytes
        for wave in waves(data_bytes, self._arena.slot_bytes(data_bytes)):
            if copy.own_slot is None:
                copy.own_slot = self._receiver.next_slot()
            device = device_of(copy.tensors.values())
            slot = self._arena.memory(copy.own_slot, wanted_bytes=data_bytes, device=device)
            if device is not None:
                self._copy_from_devices(copy, slot, wave)
            else:
                self._copy_from_host(copy, slot, wave)

    def _copy_from_host(self, copy: Copy, slot: Slot, wave: Sequence[Portion]) -> None:
        """Portions are handed over while the trainer, if it waits, copies the next ones."""
        started_s = time.perf_counter()
        pieces = [list(pieces_of(copy.image, copy.tensors, slot, portion)) for portion in wave]
        is_last = wave[-1].is_last
        copy.lend(pieces, ends_with=(lambda: _finish(copy, [])) if is_last else None)
        for number, portion in enumerate(wave):
            copy.wait_copied(number)
            if portion.is_last_of_slot:
                copy.copy_s += time.perf_counter() - started_s
            if portion.is_last and not copy.released.is_set():
                _finish(copy, [])  # A state without a byte: nobody copied a last piece.
            self._receiver.deliver(copy, slot, portion)

    def _copy_from_devices(self, copy: Copy, slot: Slot, wave: Sequence[Portion]) -> None:
        """All of a wave is queued before anything is awaited, so that the trainer can go on."""
        started_s = time.perf_counter()
        queued = [self._queue_portion(copy, slot, portion) for portion in wave]
        if wave[-1].is_last:
            _finish(copy, [event for events in queued for event in events])
        for portion, events in zip(wave, queued, strict=True):
            for _, event in events:
                event.synchronize()
            self._receiver.deliver(copy, slot, portion)
        copy.copy_s += time.perf_counter() - started_s

    def _queue_portion(self, copy: Copy, slot: Slot, portion: Portion) -> list[DeviceEvent]:
        pieces = list(pieces_of(copy.image, copy.tensors, slot, portion))
        events = []
        for device in {piece.source.device for piece in pieces if piece.source.is_cuda}:
            stream = self._stream(device, copy.ready)
            with torch.cuda.stream(stream):
                for piece in pieces:
                    if piece.source.device == device:
                        piece.copy()
                events.append((device, stream.record_event()))
        copy.lend([[piece for piece in pieces if not piece.source.is_cuda]])
        copy.wait_copied(0)
        return events

    def _stream(self, device: torch.device, ready: Sequence[torch.cuda.Event]) -> torch.cuda.Stream:
        """The side stream, behind what the compute streams had queued."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for event in ready:
            self._streams[device].wait_event(event)
        return self._streams[device]


def _finish(copy: Copy, on_device: Sequence[DeviceEvent]) -> None:
    """Everything is copied or queued behind events: the trainer may go on."""
    check_unchanged(copy)
    copy.copied.extend(dict(on_device).items())  # The last of each device.
    copy.release()


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
