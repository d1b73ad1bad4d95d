"""One entry of a log as bytes.

    +-------+----------------+-----------------+-------------+--------------+---------------------+
    | magic | header bytes,  | payload bytes,  | checksum,   | header, JSON | tensor 0 | tensor 1 |
    | 4 B   | 4 B            | 8 B             | 8 B         | `Header`     | ...                 |
    +-------+----------------+-----------------+-------------+--------------+---------------------+

Little endian. The checksum (xxh3) is of all that follows it; the rest is held against the size the
reader expects. Knows nothing of files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import torch
from xxhash import xxh3_64

from everstep.comm.framing import DTYPE_BYTES, TensorSpec
from everstep.comm.streams import empty_like_spec, memory_of, spec_of
from everstep.membership.facts import LogDirection
from everstep.recovery.log_book import LogKey

_MAGIC = b"ESL1"
_PREFIX = struct.Struct("<4sIQQ")


class RecordBroken(Exception):
    """These bytes are not the record that was written; the text says how that shows."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    attempt: int
    microbatch: int
    boundary: int
    direction: LogDirection
    structure: str
    tensors: tuple[TensorSpec, ...]


def encode_record(key: LogKey, tensors: Sequence[torch.Tensor], structure: str) -> list[memoryview]:
    """The record in parts; the tensors, contiguous ones on the host, are not copied."""
    header = msgspec.json.encode(
        Header(
            step=key.step,
            attempt=key.attempt,
            microbatch=key.microbatch,
            boundary=key.boundary,
            direction=key.direction,
            structure=structure,
            tensors=tuple(spec_of(tensor) for tensor in tensors),
        )
    )
    payload = [memory_of(tensor) for tensor in tensors if tensor.nbytes]
    checksum = xxh3_64(header)
    for part in payload:
        checksum.update(part)
    sizes = len(header), sum(map(len, payload))
    prefix = _PREFIX.pack(_MAGIC, *sizes, checksum.intdigest())
    return [memoryview(prefix + header), *payload]


def decode_record(record: memoryview, key: LogKey) -> tuple[list[torch.Tensor], str]:
    """Raises RecordBroken unless this is the whole record of `key`, as it was written."""
    if len(record) < _PREFIX.size:
        raise RecordBroken(f"{len(record)} bytes are too few for a record")
    magic, header_bytes, payload_bytes, checksum = _PREFIX.unpack_from(record)
    body = record[_PREFIX.size :]
    if magic != _MAGIC or header_bytes + payload_bytes != len(body):
        raise RecordBroken("it does not begin like the record of this size")
    if xxh3_64(body).intdigest() != checksum:
        raise RecordBroken("its checksum is wrong")
    header = _header(bytes(body[:header_bytes]))
    if _key(header) != key:
        raise RecordBroken(f"it is the record of {_key(header)}")
    return _tensors(header, body[header_bytes:]), header.structure


def _header(text: bytes) -> Header:
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise RecordBroken(f"its header cannot be read ({error})") from error


def _key(header: Header) -> LogKey:
    return LogKey(header.step, header.attempt, header.microbatch, header.boundary, header.direction)


def _tensors(header: Header, payload: memoryview) -> list[torch.Tensor]:
    if any(
        spec.dtype not in DTYPE_BYTES or min(spec.shape, default=0) < 0 for spec in header.tensors
    ):
        raise RecordBroken("it tells of tensors that cannot be")
    if sum(spec.num_bytes for spec in header.tensors) != len(payload):
        raise RecordBroken("its tensors are not of the size of its payload")
    tensors = []
    for spec in header.tensors:
        tensor = empty_like_spec(spec)
        if tensor.nbytes:
            memory_of(tensor)[:] = payload[: tensor.nbytes]
        payload = payload[tensor.nbytes :]
        tensors.append(tensor)
    return tensors
