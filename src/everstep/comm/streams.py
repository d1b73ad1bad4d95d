"""Bytes in and out: tensors as memory, sockets as streams.

Nothing here knows of keys, peers or generations. Tensors are sent from, and received into, their
own memory: the kernel's copy is the only one.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from everstep.comm.framing import (
    PREFIX_BYTES,
    Bye,
    Header,
    TensorSpec,
    decode,
    encode,
    header_bytes,
)

_MAX_BUFFERS = 512
"""Buffers given to one system call; the kernel takes at most 1024."""


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
    return TensorSpec(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def empty_like_spec(spec: TensorSpec) -> Tensor:
    # The name was checked against the table of allowed element types when the header was read.
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, writable, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


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


def is_readable(stream: socket.socket, *, timeout_s: float) -> bool:
    """Waits until there is something to read: bytes, the end of the stream or an error."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


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
