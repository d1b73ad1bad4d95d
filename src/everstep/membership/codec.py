"""Messages as bytes, and back.

MessagePack of typed, closed structs: a frame that is too large, has an unknown field or a wrong
type is refused before anything acts on it. Nothing here runs code from the wire. Tokens and the
protocol version are checked at the handshake (see access.py), before the first message.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from everstep.core.errors import MessageInvalid
from everstep.membership.messages import FromAgent, FromWorker, Message, ToAgent, ToWorker

VERSION = 5
"""Raised whenever a message changes: both ends of a connection must have the same."""

SUBPROTOCOL = f"everstep.v{VERSION}"
"""The name under which the WebSocket handshake agrees on VERSION."""

MAX_MESSAGE_BYTES = 16 << 20
"""A Resume for 4,096 workers takes under 1 MiB."""

Incoming = TypeVar("Incoming")


class Decoder(Generic[Incoming]):
    """Reads the messages that may come from one kind of peer."""

    def __init__(self, messages: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(messages)

    def decode(self, frame: bytes | str) -> Incoming:
        if isinstance(frame, str):
            raise MessageInvalid("it is text, and messages are binary", size_bytes=len(frame))
        _check_size(len(frame))
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise MessageInvalid(str(error), size_bytes=len(frame)) from None


from_worker: Decoder[FromWorker] = Decoder(FromWorker)

from_agent: Decoder[FromAgent] = Decoder(FromAgent)

to_worker: Decoder[ToWorker] = Decoder(ToWorker)

to_agent: Decoder[ToAgent] = Decoder(ToAgent)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    frame = _encoder.encode(message)
    _check_size(len(frame))
    return frame


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_MESSAGE_BYTES:
        raise MessageInvalid(f"the limit is {MAX_MESSAGE_BYTES} bytes", size_bytes=size_bytes)
