"""Bytes in and out: tensors as memory, sockets as streams.

Nothing here knows of keys, peers or generations. Tensors are sent from, and received into, their
own memory: the kernel's copy is the only one.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from everstep.comm.framing import (
    DTYPE_BYTES,
    PREFIX_BYTES,
    Bye,
    Header,
    TensorSpec,
    decode,
    encode,
    header_bytes,
)
from everstep.core.errors import ProtocolBroken

_MAX_BUFFERS = 512
"""Buffers given to one system call; the kernel takes at most 1024."""

_LEAST_WAIT_S = 1e-3
"""To the kernel, 0 would mean for ever."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StreamEnded(Exception):
    """The other end closed the stream. `is_torn` when that was in the middle of a frame."""

    def __init__(self, *, is_torn: bool) -> None:
        super().__init__("in the middle of a message" if is_torn else "between two messages")
        self.is_torn = is_torn


def host_copy(tensor: Tensor) -> Tensor:
    """The tensor itself if its memory can be sent as it is, else a contiguous copy on the host."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj():
        return tensor.resolve_neg()
    return tensor.to("cpu").resolve_conj().resolve_neg().contiguous()


def spec_of(tensor: Tensor) -> TensorSpec:
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.layout != torch.strided:
        raise ProtocolBroken(f"a tensor of {tensor.dtype}, {tensor.layout} cannot travel")
    return TensorSpec(dtype=name, shape=tuple(tensor.shape))


def empty_like_spec(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=_DTYPES[spec.dtype])


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable, not copied."""
    # Four times faster than through numpy, and it knows no element types that would need care.
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined] # Lives as long as the view does.
    return memoryview(memory).cast("B")


def read_header(stream: socket.socket, *, limit_bytes: int) -> Header:
    """Blocks for one header, for as long as the stream's own timeout allows."""
    prefix = _read_exactly(stream, PREFIX_BYTES)
    return decode(_read_exactly(stream, header_bytes(prefix, limit_bytes=limit_bytes)))


def _read_exactly(stream: socket.socket, num_bytes: int) -> bytearray:
    found = bytearray()
    while len(found) < num_bytes:
        part = stream.recv(num_bytes - len(found))
        if not part:
            raise StreamEnded(is_torn=len(found) > 0)
        found += part
    return found


def limit_waits(stream: socket.socket, seconds: float) -> None:
    """From now on, a read that waits gives up after so long with `BlockingIOError`."""
    whole, fraction = divmod(max(seconds, _LEAST_WAIT_S), 1.0)
    limit = struct.pack("@ll", int(whole), int(fraction * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def send_some(
    stream: socket.socket, buffers: Sequence[memoryview], *, flags: int = 0
) -> list[memoryview]:
    """One system call. Returns what it did not take."""
    num_sent = stream.sendmsg(buffers[:_MAX_BUFFERS], [], flags)
    left = list(buffers)
    while left and num_sent >= len(left[0]):
        num_sent -= len(left.pop(0))
    if num_sent:
        left[0] = left[0][num_sent:]
    return left


def send_all(stream: socket.socket, buffers: Sequence[memoryview]) -> None:
    left = list(buffers)
    while left:
        left = send_some(stream, left)


def cut(stream: socket.socket) -> None:
    """Ends the stream both ways, which frees any thread blocked on it. Safe to repeat."""
    # Not connected any more, or not yet: then there is nothing to free.
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def say_bye(stream: socket.socket) -> None:
    """Tells the other end that we leave on purpose. A courtesy: it never waits and never raises."""
    with suppress(OSError):
        stream.send(encode(Bye()), socket.MSG_DONTWAIT)
