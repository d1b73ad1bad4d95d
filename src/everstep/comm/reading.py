"""Takes frames off a stream bit by bit, never blocking.

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
from everstep.core.errors import ProtocolViolation


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


def messages(stream: socket.socket) -> Iterator[Message | End | None]:
    """Yields each message, `None` where more bytes have to come first, and at last an `End`."""
    while True:
        try:
            message = yield from _message(stream)
        except StreamEnded as ended:
            message = End(cause=f"its end of the channel closed {ended}")
        except OSError as error:
            message = End(cause=str(error))
        except ProtocolViolation as violation:
            message = End(cause=violation.what, is_violation=True)
        yield message
        if isinstance(message, End):
            return


def _message(stream: socket.socket) -> Generator[None, None, Message | End]:
    prefix = bytearray(PREFIX_BYTES)
    yield from _fill(stream, memoryview(prefix), is_first=True)
    body = bytearray(header_bytes(prefix))
    yield from _fill(stream, memoryview(body))
    match decode(body):
        case Payload(key=key, structure=structure, tensors=specs):
            tensors = tuple(empty_like_spec(spec) for spec in specs)
            for tensor in tensors:
                yield from _fill(stream, memory_of(tensor))
            return Message(key=key, structure=structure, tensors=tensors)
        case Bye():
            return End(cause="it left the generation", has_left=True)
        case header:
            return End(cause=f"a misplaced {type(header).__name__}", is_violation=True)


def _fill(
    stream: socket.socket, view: memoryview, *, is_first: bool = False
) -> Generator[None, None, None]:
    num_wanted = len(view)
    while view:
        try:
            num_read = stream.recv_into(view, len(view), socket.MSG_DONTWAIT)
        except BlockingIOError:
            yield
            continue
        if num_read == 0:
            raise StreamEnded(is_torn=not is_first or len(view) < num_wanted)
        view = view[num_read:]
