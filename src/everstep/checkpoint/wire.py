"""What trainer and writer say to each other, over a pair of Unix sockets on one machine.

A frame is its length in 4 bytes and MessagePack. Shared memory goes along as a file descriptor, so
it has no name that could be left behind.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any, TypeAlias

import msgspec

MAX_FRAME_BYTES = 256 << 20
"""Far above any real one (a tensor takes about 100 bytes): a longer length is garbage."""


SENT_WITHIN_S = 30.0
"""A writer that reads nothing for so long is stopped or stuck."""


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First of all: where checkpoints go."""

    directory: str
    patience_s: float
    """How long to wait for the parts of others."""
    probe_bytes: int


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Slot `slot` is the shared memory that comes along."""

    slot: int
    size_bytes: int


class Tensor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    offsets: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A part is about to come, in waves."""

    job: int
    step: int
    run: str
    index: int
    of: int
    head: bytes
    tensors: tuple[Tensor, ...]
    data_bytes: int
    plain: Any
    about: dict[str, Any]


class Wave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes `at ... at + size_bytes` of the data section lie in a slot, from `slot_at` on."""

    job: int
    slot: int
    slot_at: int
    at: int
    size_bytes: int
    frees_slot: bool
    """Nothing more comes in this slot: it is free when this is written."""
    is_last: bool


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This job is not wanted any more."""

    job: int
    slot: int | None = None
    """In which waves of it were still to come: free from now on."""


class Hurry(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody begins a part of a run other than this one any more."""

    run: str


class Remove(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    steps: tuple[int, ...]


Order: TypeAlias = Open | Attach | Begin | Wave | Abandon | Hurry | Remove


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    disk_bytes_per_s: float


class SlotFree(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    slot: int


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The checkpoint is there and on disk."""

    job: int
    write_s: float
    """From the first wave until this part's bytes were on disk."""
    saved: tuple[tuple[int, float | None], ...]
    """All checkpoints that are there: step and loss."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job: int
    why: str


Report: TypeAlias = Ready | SlotFree | Committed | Failed

_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order)
_decode_report = msgspec.msgpack.Decoder(Report)


class Wire:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._is_finished = False
        limit = struct.pack("ll", int(SENT_WITHIN_S), 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Order | Report, *, fd: int | None = None) -> None:
        """Raises OSError; the connection is then of no more use, and both ends see it closed."""
        data = _encode(message)
        with self._sending:
            if self._is_finished:
                raise BrokenPipeError("it was said that nothing more would be sent")
            try:
                head = len(data).to_bytes(4, "little")
                socket.send_fds(self._end, [head], [] if fd is None else [fd])
                self._end.sendall(data)
            except OSError:
                # Half a frame may be on its way: nothing sensible can follow it.
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)
                raise

    def receive_order(self) -> tuple[Order, int | None] | None:
        """The next order and the descriptor that came along; None when the trainer is gone."""
        frame = self._receive()
        return None if frame is None else (_decode_order.decode(frame[0]), frame[1])

    def receive_report(self) -> Report | None:
        frame = self._receive()
        return None if frame is None else _decode_report.decode(frame[0])

    def _receive(self) -> tuple[bytes, int | None] | None:
        try:
            head, fds, _, _ = socket.recv_fds(self._end, 4, 1)
            while head and len(head) < 4:
                head += self._read(4 - len(head))
            if not head:
                return None
            length = int.from_bytes(head, "little")
            assert length <= MAX_FRAME_BYTES, f"a frame of {length} bytes"
            return self._read(length), fds[0] if fds else None
        except (ConnectionError, EOFError):
            return None

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._end.recv_into(view[done:])
            if count == 0:
                raise EOFError
            done += count
        return bytes(data)

    def finish(self) -> None:
        """Nothing more will be sent; the other side reads what is there, then the end."""
        with self._sending, contextlib.suppress(OSError):
            self._is_finished = True
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()
