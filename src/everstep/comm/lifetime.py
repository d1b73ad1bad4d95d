"""The life of one generation: ends once, from any thread, and frees whoever waits in it.

It knows nothing of sockets or groups: they register how they are freed. Because forming a group or
opening channels can block too, a `Lifetime` exists before them and ends them half-built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep.core.errors import GenerationEnded


class Lifetime:
    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        """Idempotent. Returns when every registered callback has run."""
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Runs `callback`, quick and never raising, at the end; at once if that has been."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """What was closed in an orderly way need not be freed; unknown callbacks are ignored."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    @contextmanager
    def freeing(self, callback: Callable[[], None]) -> Iterator[None]:
        """Inside the block, an end of the life runs `callback`."""
        self.on_end(callback)
        try:
            yield
        finally:
            self.forget(callback)

    def pause(self, seconds: float) -> None:
        """Sleeps, but not beyond the end of the life."""
        self._ended.wait(seconds)

    def check(self) -> None:
        if self._ended.is_set():
            raise GenerationEnded(self.generation)
