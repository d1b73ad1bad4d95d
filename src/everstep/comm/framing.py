"""Frames: what travels on a channel, as bytes.

Pure: no socket, no torch. A frame is a length, a header and, for `Payload`, the tensors' bytes.

    +---------------+------------------+------------------------------+
    | length, 4 B   | header, msgpack  | tensor 0 | tensor 1 | ...    |
    +---------------+------------------+------------------------------+
      little endian   `Header`, tagged   sizes follow from the header

Nothing is allocated for a frame before its sizes were checked against the limits, so a broken or
hostile peer cannot make us reserve memory at will.
"""

from __future__ import annotations

import math
import struct
from enum import StrEnum

import msgspec

from everstep.core.errors import ProtocolBroken
from everstep.core.ids import WorkerId

VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_HELLO_BYTES = 4 << 10
"""The first frame of a connection comes from somebody who has not shown the token yet."""

MAX_PAYLOAD_BYTES = 16 << 30
MAX_DIMS = 64

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""The element types that may travel, by torch's names. The only ones a peer can make us look up."""

_LENGTH = struct.Struct("<I")
PREFIX_BYTES = _LENGTH.size


class Direction(StrEnum):
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    LOG = "log"
    """What was logged, for a stage that is rebuilt."""
    LOGGED_AGAIN = "logged again"
    """What a helper of such a stage found that it had sent, for its new worker's log."""


class Refusal(StrEnum):
    """Why an endpoint closes the door."""

    VERSION = "it speaks another version of the protocol"
    TOKEN = "the token is wrong"
    OVER = "that generation is over"
    UNEXPECTED = "it expects no such channel in that generation"
    DUPLICATE = "that channel is connected already"
    LATE = "it did not open that generation in time"
    CLOSED = "it is shutting down"


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Opens a connection: which channel of which generation it is for."""

    version: int = VERSION
    generation: int
    token: str
    sender: WorkerId
    direction: Direction


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The endpoint's answer to a `Hello` it accepts."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The endpoint's answer to a `Hello` it does not accept; it closes the connection."""

    reason: Refusal


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class Payload(msgspec.Struct, frozen=True, kw_only=True, tag="payload"):
    """Announces tensors; their bytes follow in this order."""

    key: str
    structure: str
    tensors: tuple[TensorSpec, ...]


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag="bye"):
    """The last frame of a peer that leaves on purpose; one that was killed does not send it."""


Header = Hello | Welcome | Refused | Payload | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def encode(header: Header) -> bytes:
    """The frame up to and including its header."""
    body = _encoder.encode(header)
    if len(body) > MAX_HEADER_BYTES:
        raise ProtocolBroken(f"a header of {len(body)} bytes (limit {MAX_HEADER_BYTES})")
    return _LENGTH.pack(len(body)) + body


def header_bytes(prefix: bytes | bytearray, *, limit_bytes: int = MAX_HEADER_BYTES) -> int:
    """The size of the header that follows a frame's first `PREFIX_BYTES` bytes."""
    (length,) = _LENGTH.unpack(prefix)
    if length > limit_bytes:
        raise ProtocolBroken(f"a header of {length} bytes (limit {limit_bytes})")
    return int(length)


def decode(body: bytes | bytearray) -> Header:
    try:
        header = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolBroken(f"a header that cannot be read ({error})") from error
    if isinstance(header, Payload):
        check_payload(header)
    return header


def check_payload(payload: Payload) -> None:
    """Raises unless element types are known, shapes possible and the total size allowed."""
    num_bytes = 0
    for spec in payload.tensors:
        if spec.dtype not in DTYPE_BYTES:
            raise ProtocolBroken(f"a tensor of unknown element type {spec.dtype[:40]!r}")
        # Sizes of 0 must not hide others that torch cannot represent.
        num_elements_apart_from_zeros = math.prod(max(size, 1) for size in spec.shape)
        is_possible = (
            len(spec.shape) <= MAX_DIMS
            and min(spec.shape, default=0) >= 0
            and num_elements_apart_from_zeros <= MAX_PAYLOAD_BYTES
        )
        if not is_possible:
            raise ProtocolBroken(f"a tensor of impossible shape {spec.shape[:MAX_DIMS]}")
        num_bytes += spec.num_bytes
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolBroken(f"a payload of {num_bytes} bytes (limit {MAX_PAYLOAD_BYTES})")
