"""What an agent and its warm parent say to each other, over one inherited socket.

The socket keeps packets whole, so each is one JSON value. The write end of a worker's output pipe
travels with its Fork.
"""

from __future__ import annotations

import socket
from typing import TypeAlias

import msgspec

MAX_ORDER_BYTES = 128 << 10
"""Below what a packet socket takes by default (208 KiB)."""


class _Packet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    pass


class Fork(_Packet, frozen=True, kw_only=True):
    uid: str
    script: str
    args: tuple[str, ...]
    environment: dict[str, str]
    """On top of the parent's own."""

    num_threads: int


class Kill(_Packet, frozen=True, kw_only=True):
    """Sends a signal to a worker and what it started. The parent does it, because only the process
    that reaps a pid knows that the number still means the same process."""

    pid: int
    signal: int


class Warm(_Packet, frozen=True, kw_only=True):
    seconds: float


class Forked(_Packet, frozen=True, kw_only=True):
    uid: str
    pid: int


class Exited(_Packet, frozen=True, kw_only=True):
    uid: str
    pid: int
    code: int


Order: TypeAlias = Fork | Kill
Report: TypeAlias = Warm | Forked | Exited

_encoder = msgspec.json.Encoder()
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def send_order(channel: socket.socket, order: Order, *, descriptors: tuple[int, ...] = ()) -> None:
    socket.send_fds(channel, [_encoder.encode(order)], descriptors)


def read_order(channel: socket.socket) -> tuple[Order, list[int]] | None:
    """The next order and the descriptors that came with it; None when the agent is gone."""
    packet, descriptors, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 1)
    return (_orders.decode(packet), descriptors) if packet else None


def send_report(channel: socket.socket, report: Report) -> None:
    channel.send(_encoder.encode(report))


def read_report(channel: socket.socket) -> Report | None:
    """None when the parent is gone."""
    try:
        packet = channel.recv(MAX_ORDER_BYTES)
    except ConnectionError:
        return None
    return _reports.decode(packet) if packet else None
