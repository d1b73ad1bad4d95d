"""Gives a writer its orders in the test's own process: saves without an engine."""

from __future__ import annotations

import os
from pathlib import Path

from everstep.checkpoint.disk import Disk
from everstep.checkpoint.image import Content, lay_out, round_up
from everstep.checkpoint.raw import bytes_of, dtype_name
from everstep.checkpoint.state import FlatState
from everstep.checkpoint.wire import Attach, Begin, Committed, Open, Remove, Report, Tensor, Wave
from everstep.checkpoint.writer import Writer


class OrderedWriter:
    def __init__(
        self, directory: Path | str, *, disk: Disk | None = None, patience_s: float = 9.0
    ) -> None:
        self.reports: list[Report] = []
        self._writer = Writer(self.reports.append, disk=disk)
        self._num_jobs = 0
        self._writer.obey(
            Open(directory=str(directory), patience_s=patience_s, probe_bytes=0), None
        )

    def save(
        self, step: int, state: FlatState, *, run: str = "run", index: int = 0, of: int = 1
    ) -> bool:
        """Whether the writer said that it is durable."""
        image = lay_out(
            Content(name=name, dtype=dtype_name(t.dtype), shape=tuple(t.shape))
            for name, t in state.tensors.items()
        )
        data = b"".join(
            bytes_of(state.tensors[placed.content.name].contiguous()).numpy().tobytes()
            for placed in image.placed
        )
        self._num_jobs += 1
        begin = Begin(
            job=self._num_jobs,
            step=step,
            run=run,
            index=index,
            of=of,
            head=image.head,
            tensors=tuple(
                Tensor(
                    name=placed.content.name,
                    dtype=placed.content.dtype,
                    shape=placed.content.shape,
                    start=placed.start,
                    size_bytes=placed.content.size_bytes,
                )
                for placed in image.placed
            ),
            data_bytes=image.data_bytes,
            plain=state.plain,
            about={},
        )
        size_bytes = max(round_up(len(data)), 4096)
        fd = os.memfd_create("slot")
        os.ftruncate(fd, size_bytes)
        os.pwrite(fd, data, 0)
        wave = Wave(
            job=self._num_jobs,
            slot=0,
            slot_at=0,
            at=0,
            size_bytes=len(data),
            frees_slot=True,
            is_last=True,
        )
        self._writer.obey(Attach(slot=0, size_bytes=size_bytes), fd)
        self._writer.obey(begin, None)
        self._writer.obey(wave, None)
        return any(isinstance(r, Committed) and r.job == self._num_jobs for r in self.reports)

    def remove(self, *steps: int) -> None:
        self._writer.obey(Remove(steps=steps), None)
        self._writer.wait_swept()

    def look_for_parts(self) -> None:
        self._writer.look_for_parts()

    def hurry(self) -> None:
        """As when its trainer has died."""
        self._writer.hurry()
