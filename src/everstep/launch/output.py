"""Workers' output: whole lines, in order, each marked with who wrote it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import BinaryIO, TypeAlias

Sink: TypeAlias = Callable[[str], None]
"""Takes one line, without its end."""

MAX_LINE_BYTES = 64 << 10
"""A longer line is passed on in pieces: a worker that never ends its line must not fill memory."""


def write_line(line: str) -> None:
    """A reader that has left (`| head`) must not leave workers blocked on full pipes."""
    with suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Output:
    """Follows workers' pipes, each on a thread of its own, into one sink."""

    def __init__(self, sink: Sink = write_line) -> None:
        self._sink = sink
        self._one_at_a_time = threading.Lock()
        self._threads: list[threading.Thread] = []

    def follow(self, descriptor: int, *, label: str) -> None:
        """Takes over the read end of a pipe and closes it at its end."""
        thread = threading.Thread(
            target=self._forward,
            args=(os.fdopen(descriptor, "rb"), label),
            name=f"everstep-output-{label}",
            daemon=True,
        )
        self._threads = [t for t in self._threads if t.is_alive()]
        self._threads.append(thread)
        thread.start()

    def wait_drained(self, *, timeout_s: float) -> bool:
        """Whether all pipes ended in time. A process that a worker left behind may hold one."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _forward(self, pipe: BinaryIO, label: str) -> None:
        with pipe:
            for line in _lines(pipe):
                with self._one_at_a_time:
                    self._sink(f"[{label}] {line}")


def _lines(pipe: BinaryIO) -> Iterator[str]:
    while raw := pipe.readline(MAX_LINE_BYTES):
        yield raw.decode(errors="replace").rstrip("\r\n")
