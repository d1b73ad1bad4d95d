"""One thread that reads ahead for all channels of a generation.

It calls back whoever watches a stream on which something has arrived. What it calls never waits,
so one slow peer holds up no other channel.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable

_JOIN_S = 5.0


class Reader:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._stop = os.eventfd(0)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="everstep reader", daemon=True)
        self._thread.start()

    def watch(self, stream: socket.socket, callback: Callable[[], None]) -> None:
        """Until `unwatch`, calls back on the reader's thread whenever the stream can be read."""
        self._callbacks[stream.fileno()] = callback
        self._epoll.register(stream, select.EPOLLIN)

    def unwatch(self, stream: socket.socket) -> None:
        """A call that is under way already may still come."""
        self._epoll.unregister(stream)

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(_JOIN_S)
        self._epoll.close()
        os.close(self._stop)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._stop:
                    return
                self._callbacks[descriptor]()
