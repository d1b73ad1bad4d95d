"""The trainer's end of the writer: starts it, sends orders, listens on a thread, reaps it.

Knows nothing of saves. A writer that ended, however it ended, is told once as `gone`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint.arena import Slot
from everstep.checkpoint.wire import Attach, Order, Report, Wire


class WriterProcess:
    def __init__(
        self,
        *,
        heard: Callable[[WriterProcess, Report], None],
        gone: Callable[[WriterProcess, str], None],
    ) -> None:
        self._heard = heard
        self._gone = gone
        self._attached: dict[int, Slot] = {}
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "everstep.checkpoint.writer",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                # Its own session: a Ctrl-C or a kill of the trainer's group does not reach it. And
                # no pipe of the trainer's: whoever reads those must not wait for the writer.
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        self._wire = Wire(ours)
        self._thread = threading.Thread(target=self._listen, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: Order) -> None:
        """Raises OSError when the writer is gone."""
        self._wire.send(order)

    def attach(self, slot: Slot) -> None:
        """Gives it the memory of a slot, once."""
        # By the slot itself: a slot that was made anew may have the old one's descriptor.
        if self._attached.get(slot.number) is not slot:
            order = Attach(slot=slot.number, size_bytes=slot.size_bytes)
            self._wire.send(order, fd=slot.fd)
            self._attached[slot.number] = slot

    def finish(self, timeout_s: float) -> bool:
        """No order will come any more. Whether it ended within the time: if not, it goes on."""
        self._wire.finish()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        while (report := self._wire.receive_report()) is not None:
            self._heard(self, report)
        code = self._process.wait()
        self._gone(self, f"the writer process ended ({_how(code)})")
        self._wire.close()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _environment() -> dict[str, str]:
    """The trainer's, with everstep on the path even where only the trainer's sys.path had it."""
    home = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{known}" if known else home}
