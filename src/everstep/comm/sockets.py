"""Finds sockets that a library opened inside this process, and keeps hold of them.

Linux only: it looks into /proc/self/fd. Every socket it returns is a duplicate of its own, so the
library may close the original, and its number be reused, without harm.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable
from contextlib import suppress

Address = tuple[str, int]


def open_sockets() -> dict[str, int]:
    """The process's sockets now: a name that is never reused while open, and the descriptor."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # Closed since the listing.
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found[name] = int(descriptor)
    return found


def duplicates(descriptors: Iterable[int]) -> list[socket.socket]:
    """Duplicates of those that still are sockets."""
    found = []
    for descriptor in descriptors:
        with suppress(OSError):
            duplicate = os.dup(descriptor)
            try:
                found.append(socket.socket(fileno=duplicate))
            except OSError:
                os.close(duplicate)
    return found


def local_address(each: socket.socket) -> Address | None:
    return _address(each.getsockname()) if each.family != socket.AF_UNIX else None


def peer_address(each: socket.socket) -> Address | None:
    """The other end; none for sockets that are not connected."""
    try:
        return _address(each.getpeername()) if each.family != socket.AF_UNIX else None
    except OSError:
        return None


def is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def has_hung_up(each: socket.socket) -> bool:
    """Whether the other end has closed the connection."""
    poll = select.poll()
    poll.register(each, select.POLLRDHUP)
    return bool(poll.poll(0))


def _address(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]
