"""Takes checkpoints without stopping training: one engine per rank.

    save(step, state)     the copy begins; returns at once
    before_update()       returns when the copy no longer needs the tensors; its wait is the stall
    poll()                what became of the saves

Trouble with the disk or the writer is an event and a warning, never an exception: training goes on
and the next save is tried. Does not decide when to save (policy) nor what to keep (retention).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

from everstep.checkpoint.arena import Arena
from everstep.checkpoint.copier import Copier, Copy, versions_of
from everstep.checkpoint.delivery import Delivery, Outcome, Save
from everstep.checkpoint.image import Content, FileImage, lay_out
from everstep.checkpoint.layout import Layout, Part, names_to_write
from everstep.checkpoint.raw import device_of, dtype_name
from everstep.checkpoint.remote_storage import RemoteFolder, is_url
from everstep.checkpoint.retention import Entry, Retention
from everstep.checkpoint.state import JSON, FlatState
from everstep.checkpoint.telemetry import DeviceWait, Measured, queued_events, ratio_to_limit
from everstep.checkpoint.wire import Committed, Open
from everstep.core.errors import ConfigError, WaitTimedOut

Event: TypeAlias = Mapping[str, object]

_logger = logging.getLogger("everstep.checkpoint")

READY_WITHIN_S = 5.0
"""A Python process starts in tenths of a second; on a busy machine in a few."""

LEAVE_WITHIN_S = 1.0
"""What is left of a copy that was begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    max_slot_bytes: int | None = None
    """Bound on the memory of one slot; a larger state is copied in waves, and the trainer waits for
    the disk between them. None: an eighth of the machine's memory."""

    num_slots: int = 2
    """Copies that may wait for the disk. With one, a save is skipped while the last is written."""

    wave_timeout_s: float = 60.0
    """How long a copy in waves waits for the disk before that save is given up."""

    patience_s: float = 600.0
    """How long a part waits for those of other ranks."""

    probe_bytes: int = 64 << 20
    """Written once at the start, to know the disk's rate. 0: not measured."""

    close_timeout_s: float = 60.0
    """How long `close` waits for the writer; after that the writer goes on alone."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "wave_timeout_s", "patience_s", "close_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"engine.{name}", getattr(self, name), "it must be positive")

    @property
    def slot_limit_bytes(self) -> int:
        if self.max_slot_bytes is not None:
            return self.max_slot_bytes
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


class Engine:
    def __init__(
        self,
        directory: str | Path,
        *,
        part: Part = Part(0, 1),  # noqa: B008 a frozen value
        settings: EngineSettings | None = None,
        keep: Retention | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`directory` may be any fsspec URL. `on_event` is called on a thread of the engine's, as
        things happen."""
        if is_url(directory):
            RemoteFolder(str(directory))  # A library that is missing is told now, to the user.
        self._settings = settings = settings or EngineSettings()
        self._part = part if part.run else replace(part, run=uuid.uuid4().hex[:12])
        self._keep = keep
        self._on_event = on_event
        self._events: list[Event] = []
        self._telling = threading.Lock()
        self._measured = Measured()
        self._num_saves = 0
        self._image = FileImage(head=b"", placed=(), data_bytes=0)
        self._copying: list[Save] = []
        self._is_closed = False
        self._making: threading.Thread | None = None
        self._arena = Arena(num_slots=settings.num_slots, max_slot_bytes=settings.slot_limit_bytes)
        self._delivery = Delivery(
            self._arena,
            Open(
                directory=str(directory),
                patience_s=settings.patience_s,
                probe_bytes=settings.probe_bytes,
            ),
            wave_timeout_s=settings.wave_timeout_s,
            ended=self._ended,
        )
        self._copier = Copier(self._arena, self._delivery)

    @property
    def costs(self) -> Measured:
        return replace(
            self._measured,
            copy_bytes_per_s=self._arena.copy_bytes_per_s,
            disk_bytes_per_s=self._delivery.disk_bytes_per_s,
        )

    @property
    def writer_pid(self) -> int | None:
        writer = self._delivery.writer
        return writer.pid if writer else None

    def start_writer(self) -> None:
        """Ahead of the first save. Optional."""
        with _ahead():
            self._delivery.start_writer()

    def prepare(
        self, state: FlatState, *, layout: Layout | None = None, is_awaited: bool = True
    ) -> None:
        """Makes the memory for a copy of this state, ahead of the first save. Optional; takes about
        a second per gigabyte, which that save would take otherwise.

        Waits for a writer that was started: one that is only about to look at what it was handed
        would not be seen by a trainer that comes after this one was killed.

        Args:
            is_awaited: else the memory is made on a thread, unless a save would then find no slot.
        """
        tensors = self._to_write(state, layout or Layout())
        image = self._lay_out(tensors, layout or Layout())
        number = self._arena.take()
        if number is None:
            return
        device = device_of(tensors.values())

        def make() -> None:
            try:
                with _ahead():
                    self._arena.memory(number, wanted_bytes=image.data_bytes, device=device)
            finally:
                self._arena.give_back(number)

        if is_awaited or self._settings.num_slots == 1:
            make()
        else:
            self._making = threading.Thread(target=make, name="everstep slot", daemon=True)
            self._making.start()
        self._delivery.wait_ready(READY_WITHIN_S)

    def save(
        self,
        step: int,
        state: FlatState,
        *,
        about: Mapping[str, JSON] | None = None,
        layout: Layout | None = None,
        run: str | None = None,
        wait_s: float = 0.0,
    ) -> bool:
        """Starts a copy of the state as it is now. False: skipped, and an event says why.

        Args:
            run: instead of the part's, where the others of a save change while the engine lives.
            wait_s: for a slot, while those before it are still being written.
        """
        assert not self._is_closed, "the engine is closed"
        started_s = time.monotonic()
        tensors = _standing_still(self._to_write(state, layout or Layout()), state.volatile)
        image = self._lay_out(tensors, layout or Layout())
        slot = self._arena.take(timeout_s=wait_s)
        if slot is None:
            self._tell_failed(step, "skipped: those before it are still being written")
            return False
        copy = Copy(
            number=self._num_saves,
            image=image,
            tensors=tensors,
            own_slot=slot,
            ready=queued_events(tensors.values()),
            versions=versions_of(tensors),
        )
        self._num_saves += 1
        part = self._part if run is None else replace(self._part, run=run)
        save = Save(
            part=part,
            step=step,
            copy=copy,
            plain=state.plain,
            about=dict(about or {}),
            started_s=started_s,
        )
        self._delivery.accept(save)
        self._copying.append(save)
        self._copier.submit(copy)
        save.stall_s += time.monotonic() - started_s
        return True

    def before_update(self) -> None:
        """Returns when tensors may be changed. On CUDA the device waits, not the processor."""
        copying, self._copying = self._copying, []
        for save in copying:
            started_s = time.monotonic()
            # A copy ends by itself: each of its waits for the disk is bounded, and then it fails.
            while not save.copy.wait_released(self._settings.wave_timeout_s):
                _logger.warning(
                    "the copy of step %d takes %.0f s so far",
                    save.step,
                    time.monotonic() - started_s,
                )
            for device, copied in save.copy.copied:
                save.device_waits.append(DeviceWait(copied, device))
            save.stall_s += time.monotonic() - started_s

    def abandon(self, step: int, *, why: str) -> None:
        """Another part of it has failed: this one need not wait for it."""
        self._delivery.abandon(step, why)

    def hurry(self, run: str) -> None:
        """From now on all save as `run`. What is under way as another is waited for only while
        somebody is seen writing it."""
        self._delivery.hurry(run)

    def poll(self) -> list[Event]:
        with self._telling:
            events, self._events = self._events, []
        return events

    def wait(self, timeout_s: float) -> None:
        """Until everything saved is durable or has failed."""
        self.before_update()
        self._delivery.wait_ended(timeout_s)

    def wait_handed_over(self, timeout_s: float) -> None:
        """Until this process may die without losing what it saved: the writer has it all."""
        self.before_update()
        self._delivery.wait_handed_over(timeout_s)

    def close(self) -> None:
        """Waits for the writer, but not for ever: what it has in hand becomes durable anyway."""
        if self._is_closed:
            return
        self._is_closed = True
        self.before_update()
        timeout_s = self._settings.close_timeout_s
        is_copied = self._copier.close(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        with suppress(WaitTimedOut):
            # What a save makes superfluous is removed by its writer, when the save has ended.
            self._delivery.wait_ended(timeout_s)
        if not self._delivery.finish(max(0.0, deadline_s - time.monotonic())):
            _logger.warning("the checkpoint writer (process %s) goes on alone", self.writer_pid)
        if is_copied and self._wait_made(max(0.0, deadline_s - time.monotonic())):
            self._arena.close()

    def leave(self) -> None:
        """Closes without a wait for the disk: what the writer was given becomes durable, what it
        was not given whole is dropped."""
        if not self._is_closed:
            self._is_closed = True
            self._copier.close(LEAVE_WITHIN_S)
            self._wait_made(LEAVE_WITHIN_S)
            self._delivery.finish(0.0)

    def _wait_made(self, timeout_s: float) -> bool:
        """Whether the thread that makes a slot, if there is one, is done in time."""
        if self._making is not None:
            self._making.join(timeout_s)
        return self._making is None or not self._making.is_alive()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _to_write(self, state: FlatState, layout: Layout) -> dict[str, torch.Tensor]:
        sizes = {name: tensor.nbytes for name, tensor in state.tensors.items()}
        mine = names_to_write(sizes, part=self._part, layout=layout)
        return {name: tensor for name, tensor in state.tensors.items() if name in mine}

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> FileImage:
        contents = [
            Content(
                name=name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                slice=layout.slices.get(name),
            )
            for name, tensor in tensors.items()
        ]
        # States rarely change their shape: the image of the last save is nearly always right.
        if {placed.content for placed in self._image.placed} != set(contents):
            self._image = lay_out(contents)
        return self._image

    def _ended(self, save: Save, outcome: Outcome) -> None:
        """Called on the copier's thread or the writer's."""
        if isinstance(outcome, Committed):
            self._tell_saved(save, outcome)
            self._retain(save.step, outcome)
        else:
            self._tell_failed(save.step, outcome)

    def _tell_saved(self, save: Save, committed: Committed) -> None:
        durable_s = time.monotonic() - save.started_s
        size_bytes, copy_s = save.copy.image.file_bytes, save.copy.copy_s
        stall_s = save.stall_s + sum(wait.seconds() for wait in save.device_waits)
        self._measured = self._measured.after(
            stall_s=stall_s, durable_s=durable_s, size_bytes=size_bytes
        )
        limits = self.costs
        self._tell(
            {
                "event": "checkpoint",
                "step": save.step,
                "stall_seconds": stall_s,
                "durable_seconds": durable_s,
                "copy_seconds": copy_s,
                "write_seconds": committed.write_s,
                "bytes": size_bytes,
                "copy_ratio": ratio_to_limit(
                    size_bytes, seconds=copy_s, limit_bytes_per_s=limits.copy_bytes_per_s
                ),
                "disk_ratio": ratio_to_limit(
                    size_bytes,
                    seconds=committed.write_s,
                    limit_bytes_per_s=limits.disk_bytes_per_s,
                ),
            }
        )

    def _tell_failed(self, step: int, why: str) -> None:
        _logger.warning("no checkpoint of step %d: %s; training goes on", step, why)
        self._tell({"event": "checkpoint_failed", "step": step, "why": why})

    def _tell(self, event: Event) -> None:
        with self._telling:
            self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def _retain(self, step: int, committed: Committed) -> None:
        """The first part does it for all. The one just made stays, whatever the policy says."""
        if self._keep is None or self._part.index != 0:
            return
        entries = [Entry(step=step, loss=loss) for step, loss in committed.saved]
        newest = max(entry.step for entry in entries)
        kept = self._keep.keeps(entries) | {newest, step}
        gone = tuple(entry.step for entry in entries if entry.step not in kept)
        if gone:
            self._delivery.remove(gone)


@contextmanager
def _ahead() -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError) as error:
        _logger.warning("checkpoints could not be prepared for, and may fail: %s", error)


def _standing_still(
    tensors: Mapping[str, torch.Tensor], volatile: Collection[str]
) -> dict[str, torch.Tensor]:
    # Cloned in the compute stream's order, before a forward pass can touch it.
    return {name: t.clone() if name in volatile else t for name, t in tensors.items()}
