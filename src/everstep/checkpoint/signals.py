"""SIGTERM and SIGINT, noted while training runs so that one more checkpoint can be taken.

The first one is only noted: `pass_on` lets whoever would have got it act, when the time has come.
The second one is passed on at once. A signal that was ignored before stays ignored.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

_logger = logging.getLogger("everstep.checkpoint")

NOTED = (signal.SIGTERM, signal.SIGINT)

Previous: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


class Signals:
    """Does nothing outside the main thread, where Python gives signals to nobody."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Previous] = {}
        self._is_in_loop: Callable[[FrameType | None], bool] = lambda _: True

    def start(self, is_in_loop: Callable[[FrameType | None], bool] = lambda _: True) -> None:
        """`is_in_loop` tells from the frame that was interrupted whether training runs: for loops
        that do not say when they end by an exception. What comes outside is passed on at once."""
        self._is_in_loop = is_in_loop
        if threading.current_thread() is not threading.main_thread():
            _logger.info("not in the main thread: SIGTERM and SIGINT will not be noted")
            return
        for number in NOTED:
            # None: it belongs to something that is not Python and could not be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._note)

    def stop(self) -> None:
        """Puts back what was there, where nobody else has come since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, previous)
        self._previous = {}
        self.received = None

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """Whoever was there before gets the signal; may raise, end the process, or return."""
        self.received = None
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
            return
        self.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None or not self._is_in_loop(frame):
            self.pass_on(number, frame)
            return
        self.received = number
        # No logging here: the signal may have come while a log record was being written.
        message = f"{signal.Signals(number).name}: saving once more; send it again to leave now\n"
        os.write(2, message.encode())
