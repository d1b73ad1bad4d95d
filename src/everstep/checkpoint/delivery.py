"""Brings full slots to the writer and hears what became of them; starts a new writer when needed.

Three threads meet here: the trainer's (`accept`), the copier's (`next_slot`, `deliver`, `failed`)
and one that listens to each writer. Invariant: a slot that a writer was given is free again only by
that writer's word or its death, so no writer ever reads a slot that is filled anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from everstep.checkpoint.arena import Arena, Slot
from everstep.checkpoint.copier import Copy, SaveFailed
from everstep.checkpoint.layout import Part
from everstep.checkpoint.pieces import Portion
from everstep.checkpoint.state import JSON
from everstep.checkpoint.telemetry import DeviceWait
from everstep.checkpoint.wire import (
    Abandon,
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
    Tensor,
    Wave,
)
from everstep.checkpoint.writer_process import WriterProcess
from everstep.core.errors import WaitTimedOut


@dataclass(slots=True, kw_only=True)
class Save:
    """One save, from the trainer's call to its end."""

    step: int
    part: Part
    copy: Copy
    plain: JSON
    about: dict[str, JSON]
    started_s: float
    stall_s: float = 0.0
    device_waits: list[DeviceWait] = field(default_factory=list)
    writer: WriterProcess | None = None
    """Who was given its first wave, and gets the others."""
    is_handed_over: bool = False
    """The writer has all of it: it becomes durable whatever happens to this process."""


Outcome: TypeAlias = Committed | str
"""Of a save: it is durable, or why it is not."""


class Delivery:
    def __init__(
        self,
        arena: Arena,
        opening: Open,
        *,
        wave_timeout_s: float,
        ended: Callable[[Save, Outcome], None],
    ) -> None:
        """`ended` is called once per save, before `wait_ended` sees it as ended."""
        self._arena = arena
        self._opening = opening
        self._wave_timeout_s = wave_timeout_s
        self._ended = ended
        self._changed = threading.Condition()
        self._saves: dict[int, Save] = {}
        self._num_ending = 0
        self._slots: dict[int, WriterProcess] = {}
        self._lent: dict[int, tuple[WriterProcess, int]] = {}
        """Slots that a writer has begun with and the copier still fills, by save."""
        self._writer: WriterProcess | None = None
        self._is_ready = False
        self._run: str | None = None
        """What every writer is told of, also one that is started later."""

        self.disk_bytes_per_s = 0.0

    @property
    def writer(self) -> WriterProcess | None:
        return self._writer

    def accept(self, save: Save) -> None:
        with self._changed:
            self._saves[save.copy.number] = save

    def start_writer(self) -> WriterProcess:
        """The living one, or a new one. Raises OSError."""
        with self._changed:
            if self._writer is None:
                self._is_ready = False
                self._writer = WriterProcess(heard=self._heard, gone=self._writer_gone)
                self._writer.send(self._opening)
                if self._run is not None:
                    self._writer.send(Hurry(run=self._run))
            return self._writer

    def wait_ready(self, timeout_s: float) -> None:
        """Until the writer, if there is one, listens; what it is sent before is not lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._writer is None, timeout_s)

    def next_slot(self) -> int:
        number = self._arena.take(timeout_s=self._wave_timeout_s)
        if number is None:
            raise SaveFailed(f"the disk has not taken a wave within {self._wave_timeout_s:.1f} s")
        return number

    def deliver(self, copy: Copy, slot: Slot, portion: Portion) -> None:
        save, writer = self._assign(copy, slot)
        wave = Wave(
            job=copy.number,
            slot=slot.number,
            slot_at=portion.slot_at,
            at=portion.at,
            size_bytes=portion.size_bytes,
            frees_slot=portion.is_last_of_slot,
            is_last=portion.is_last,
        )
        try:
            if portion.at == 0:
                writer.send(_begin(save))
            writer.attach(slot)
            writer.send(wave)
        except OSError as error:
            raise SaveFailed(f"the writer cannot be reached: {error}") from None
        with self._changed:
            if portion.is_last_of_slot:
                del self._lent[copy.number]
            save.is_handed_over = portion.is_last
            self._changed.notify_all()

    def _assign(self, copy: Copy, slot: Slot) -> tuple[Save, WriterProcess]:
        """Whom the slot goes to. In one step with saying so, or a death could come between."""
        with self._changed:
            save = self._saves.get(copy.number)
            if save is None:
                raise SaveFailed("the writer has given up on it")
            try:
                writer = save.writer = save.writer or self.start_writer()
            except OSError as error:
                raise SaveFailed(f"no writer can be started: {error}") from None
            self._slots[slot.number] = writer
            self._lent[copy.number] = writer, slot.number
            copy.own_slot = None
            return save, writer

    def failed(self, copy: Copy, why: str) -> None:
        if copy.number in self._lent:
            writer, slot = self._lent.pop(copy.number)
            _try_send(writer, Abandon(job=copy.number, slot=slot))
        self._end(copy.number, why)

    def abandon(self, step: int, why: str) -> None:
        """What has been handed over of it is thrown away; what is still being copied goes on."""
        with self._changed:
            saves = [s for s in self._saves.values() if s.step == step and s.is_handed_over]
        for save in saves:
            if save.writer is not None:
                _try_send(save.writer, Abandon(job=save.copy.number))
            self._end(save.copy.number, why)

    def hurry(self, run: str) -> None:
        """Parts of other runs than this one come from those who have begun them, or never."""
        with self._changed:
            self._run = run
            if self._writer is not None:
                _try_send(self._writer, Hurry(run=run))

    def remove(self, steps: tuple[int, ...]) -> None:
        """If the writer dies before it has, the next one is told after the next save."""
        if self._writer is not None:
            _try_send(self._writer, Remove(steps=steps))

    def wait_handed_over(self, timeout_s: float) -> None:
        self._wait("hand-over", lambda save: not save.is_handed_over, timeout_s)

    def wait_ended(self, timeout_s: float) -> None:
        self._wait("durable checkpoint", lambda _: True, timeout_s)

    def _wait(self, what: str, is_awaited: Callable[[Save], bool], timeout_s: float) -> None:
        def awaited() -> list[int]:
            return [save.step for save in self._saves.values() if is_awaited(save)]

        def is_over() -> bool:
            return not awaited() and not self._num_ending

        with self._changed:
            if not self._changed.wait_for(is_over, timeout_s):
                steps = ", ".join(map(str, awaited()))
                raise WaitTimedOut(
                    f"{what} of step {steps}", source="the checkpoint writer", after_s=timeout_s
                )

    def finish(self, timeout_s: float) -> bool:
        """Whether the writer has done all and ended; if not, it goes on alone."""
        writer = self._writer
        return writer is None or writer.finish(timeout_s)

    def _heard(self, writer: WriterProcess, report: Report) -> None:
        match report:
            case Ready(disk_bytes_per_s=rate):
                self.disk_bytes_per_s = rate
                with self._changed:
                    self._is_ready = True
                    self._changed.notify_all()
            case SlotFree(slot=slot):
                self._free(slot, writer)
            case Committed():
                self._end(report.job, report)
            case Failed(job=job, why=why):
                self._end(job, why)

    def _free(self, number: int, writer: WriterProcess) -> None:
        with self._changed:
            if self._slots.get(number) is not writer:
                return
            del self._slots[number]
        self._arena.give_back(number)

    def _writer_gone(self, writer: WriterProcess, why: str) -> None:
        with self._changed:
            if self._writer is writer:
                self._writer = None
                self._changed.notify_all()
            slots = [number for number, holder in self._slots.items() if holder is writer]
            lost = [number for number, save in self._saves.items() if save.writer is writer]
        for number in lost:
            self._end(number, why)
        for number in slots:
            self._free(number, writer)

    def _end(self, number: int, outcome: Outcome) -> None:
        with self._changed:
            save = self._saves.pop(number, None)
            if save is None:
                return
            self._num_ending += 1
        try:
            self._ended(save, outcome)
        finally:
            with self._changed:
                self._num_ending -= 1
                self._changed.notify_all()


def _try_send(writer: WriterProcess, order: Order) -> None:
    with contextlib.suppress(OSError):  # It is dead, and its listener says so.
        writer.send(order)


def _begin(save: Save) -> Begin:
    image, part = save.copy.image, save.part
    return Begin(
        job=save.copy.number,
        step=save.step,
        run=part.run,
        index=part.index,
        of=part.of,
        head=image.head,
        tensors=tuple(
            Tensor(
                name=placed.content.name,
                dtype=placed.content.dtype,
                shape=placed.content.shape,
                start=placed.start,
                size_bytes=placed.content.size_bytes,
                offsets=placed.content.slice.offsets if placed.content.slice else (),
                whole=placed.content.slice.whole if placed.content.slice else (),
            )
            for placed in image.placed
        ),
        data_bytes=image.data_bytes,
        plain=save.plain,
        about=save.about,
    )
