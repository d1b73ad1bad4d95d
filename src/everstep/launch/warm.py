"""The agent's handle on its warm parent: start workers, signal them, hear at once when they end."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from everstep.core.errors import WaitTimedOut, WarmParentLost
from everstep.launch.orders import Exited, Fork, Forked, Kill, Warm, read_report, send_order

PRELOAD = ("torch", "torch._dynamo", "torch.profiler", "everstep.training.wiring")
"""What every worker needs and is slow to import. torch loads the two in the middle by itself when
the first optimizer is made, which costs each worker seconds."""

FORK_WITHIN_S = 10.0
CLOSE_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Script:
    path: Path
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    uid: str
    pid: int
    output: int
    """Read end of the pipe that is its stdout and stderr. Whoever gets this owns it."""


@dataclass(frozen=True, slots=True)
class ParentGone:
    """The warm parent ended, and its workers with it."""


OnReport = Callable[[Warm | Exited | ParentGone], None]


class WarmParent:
    """A context manager. `on_report` is called on a thread of its own: Warm once, then Exiteds."""

    def __init__(self, on_report: OnReport, *, preload: Sequence[str] = PRELOAD) -> None:
        self._on_report = on_report
        self._forked: queue.SimpleQueue[Forked | None] = queue.SimpleQueue()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # -P: the current folder is not on a script's path, so neither on its parent's.
            python = (sys.executable, "-P", "-m", "everstep.launch.warm_parent")
            # A session of its own: Ctrl-C on the terminal is for the launcher, which then tells us.
            self._process = subprocess.Popen(
                [*python, str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="everstep-warm", daemon=True)
        self._reader.start()

    def spawn(
        self, script: Script, *, uid: str, environment: Mapping[str, str], num_threads: int
    ) -> WorkerProcess:
        """Forks a worker. Waits for the imports when the parent is not warm yet."""
        order = Fork(
            uid=uid,
            script=str(script.path),
            args=script.args,
            environment=dict(environment),
            num_threads=num_threads,
        )
        ours, theirs = os.pipe()
        try:
            send_order(self._channel, order, descriptors=(theirs,))
            forked = self._forked.get(timeout=FORK_WITHIN_S)
        except queue.Empty:
            os.close(ours)
            raise WaitTimedOut("fork", source="the warm parent", after_s=FORK_WITHIN_S) from None
        except OSError as error:
            os.close(ours)
            raise WarmParentLost(str(error)) from error
        finally:
            os.close(theirs)
        if forked is None:
            os.close(ours)
            raise WarmParentLost(f"exit code {self._process.poll()}")
        return WorkerProcess(uid=uid, pid=forked.pid, output=ours)

    def signal(self, process: WorkerProcess, number: int) -> None:
        """To the worker and what it started; nothing happens when it has ended."""
        with suppress(OSError):  # the parent is gone, and so are its workers
            send_order(self._channel, Kill(pid=process.pid, signal=number))

    def close(self) -> None:
        """Ends the parent and whatever workers are left."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:  # still importing; it cannot have forked anything
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSE_WITHIN_S)
        self._channel.close()

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> None:
        while (report := read_report(self._channel)) is not None:
            if isinstance(report, Forked):
                self._forked.put(report)
            else:
                self._on_report(report)
        self._forked.put(None)
        self._on_report(ParentGone())
