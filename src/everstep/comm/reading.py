"""Takes frames off a stream bit by bit.

A generator keeps the place between two calls, so whoever has time may go on reading, and a wait
that runs out of time in the middle of a message loses nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from torch import Tensor

from everstep.comm.framing import PREFIX_BYTES, Bye, Payload, decode, header_bytes
from everstep.comm.streams import StreamEnded, empty_like_spec, memory_of
from everstep.core.errors import ProtocolBroken

_BUFFER_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    key: str
    structure: str
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why no more messages will come."""

    cause: str
    has_left: bool = False
    is_violation: bool = False


def messages(source: Source) -> Iterator[Message | End | None]:
    """Yields each message, `None` where more bytes have to come first, and at last an `End`."""
    while True:
        try:
            message = yield from _message(source)
        except StreamEnded as ended:
            message = End(cause=f"its end of the channel closed {ended}")
        except OSError as error:
            message = End(cause=str(error))
        except ProtocolBroken as violation:
            message = End(cause=violation.what, is_violation=True)
        yield message
        if isinstance(message, End):
            return


def _message(source: Source) -> Generator[None, None, Message | End]:
    prefix = bytearray(PREFIX_BYTES)
    yield from source.fill(memoryview(prefix), is_first=True)
    body = bytearray(header_bytes(prefix))
    yield from source.fill(memoryview(body))
    match decode(body):
        case Payload(key=key, structure=structure, tensors=specs):
            tensors = tuple(empty_like_spec(spec) for spec in specs)
            for tensor in tensors:
                yield from source.fill(memory_of(tensor))
            return Message(key=key, structure=structure, tensors=tensors)
        case Bye():
            return End(cause="it left the generation", has_left=True)
        case header:
            return End(cause=f"a misplaced {type(header).__name__}", is_violation=True)


class Source:
    """A stream with a small buffer: a small message costs one system call, not one per part."""

    def __init__(self, stream: socket.socket) -> None:
        self.may_wait = False
        """Whether a read waits for bytes, as long as the stream's limit allows."""
        self._stream = stream
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._ahead = self._buffer[:0]

    def fill(self, view: memoryview, *, is_first: bool = False) -> Generator[None, None, None]:
        """Fills the view; yields where bytes are missing. `is_first`: an end here tears nothing."""
        num_wanted = len(view)
        while view:
            if not self._ahead:
                is_large = len(view) >= _BUFFER_BYTES
                try:
                    num_read = self._read(view if is_large else self._buffer)
                except BlockingIOError:
                    yield
                    continue
                if num_read == 0:
                    raise StreamEnded(is_torn=not is_first or len(view) < num_wanted)
                if is_large:
                    view = view[num_read:]
                    continue
                self._ahead = self._buffer[:num_read]
            num_taken = min(len(view), len(self._ahead))
            view[:num_taken] = self._ahead[:num_taken]
            view, self._ahead = view[num_taken:], self._ahead[num_taken:]

    def _read(self, view: memoryview) -> int:
        # Waiting for the whole view, the kernel wakes us once, not for every packet of it.
        wait = socket.MSG_WAITALL if view is not self._buffer else 0
        flags = wait if self.may_wait else socket.MSG_DONTWAIT
        return self._stream.recv_into(view, len(view), flags)
