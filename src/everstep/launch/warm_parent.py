"""The warm parent: a process that has imported torch once and forks workers on demand.

    python -m everstep.launch.warm_parent DESCRIPTOR MODULE ...

One thread, so forking is safe. It is the workers' parent: it reaps them, and they die with it; it
ends, and ends them, when its agent's end of the socket closes. `serve` returns in a fork too, out
of its loop, so that a worker runs with the stack and the exit of an ordinary process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence

from everstep.launch.orders import (
    Exited,
    Fork,
    Forked,
    Kill,
    Warm,
    read_order,
    send_report,
)
from everstep.launch.script import run_worker

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class WarmParentLoop:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._uids: dict[int, str] = {}
        # SIGCHLD writes to `_woken`, so one select waits for orders and for exits.
        self._wakes, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)

    def serve(self) -> Fork | None:
        """In the parent: None, when the agent is gone. In each fork: what it is to run."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wakes in ready:
                    self._reap()
                if self._channel in ready:
                    received = read_order(self._channel)
                    if received is None:
                        self._end_all()
                        return None
                    order, descriptors = received
                    if isinstance(order, Kill):
                        self._kill(order.pid, order.signal)
                    elif self._fork(order, output=descriptors[0]) == 0:
                        return order

    def _fork(self, order: Fork, *, output: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(parent, output)
            return 0
        os.close(output)
        # Here and in the child: whoever comes first, the group exists before anybody signals it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._uids[pid] = order.uid
        send_report(self._channel, Forked(uid=order.uid, pid=pid))
        return pid

    def _become_worker(self, parent: int, output: int) -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for end in (self._channel, self._wakes, self._woken):
            end.close()
        os.dup2(output, sys.__stdout__.fileno() if sys.__stdout__ else 1)
        os.dup2(output, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        os.close(output)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakes.recv(4096):
                pass
        while self._uids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            uid = self._uids.pop(pid)
            # What the worker started itself goes with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                send_report(self._channel, Exited(uid=uid, pid=pid, code=code))

    def _kill(self, pid: int, number: int) -> None:
        if pid in self._uids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def _end_all(self) -> None:
        for pid in list(self._uids):
            self._kill(pid, signal.SIGKILL)
        for pid in list(self._uids):
            os.waitpid(pid, 0)


class QuickExit:
    """Ends the process when all else that runs at exit has run, without taking down modules.

    Python's own end visits every object, so a fork would copy all it shares with its parent: six
    workers with torch then take 1.4 s to end on two cores, and 0.1 s this way.
    """

    def __init__(self) -> None:
        self.code = 1
        # The first to be registered is the last to be called.
        atexit.register(self._leave)

    def _leave(self) -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.code)


def main(argv: Sequence[str]) -> int:
    descriptor, *modules = argv
    exit_ = QuickExit()
    began_s = time.monotonic()
    for module in modules:
        importlib.import_module(module)
    # What exists now is shared by all forks; their collectors must not touch, and so copy, it.
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(descriptor))
    send_report(channel, Warm(seconds=time.monotonic() - began_s))
    order = WarmParentLoop(channel).serve()
    exit_.code = 0 if order is None else run_worker(order)
    return exit_.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
