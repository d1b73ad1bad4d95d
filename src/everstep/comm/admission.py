"""Decides what happens to a connection that says `Hello`: admitted, refused or parked.

Pure: no socket, no thread, no clock. Peers do not open a generation at the same moment, so a
connection for one that is not open yet is parked; how long, the endpoint says.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from everstep.comm.framing import VERSION, Direction, Hello, Refusal
from everstep.core.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The open generation, and the channels that may come in for it."""

    generation: int
    token: str
    channels: frozenset[tuple[WorkerId, Direction]]


@dataclass(frozen=True, slots=True)
class Admit:
    pass


@dataclass(frozen=True, slots=True)
class Park:
    pass


@dataclass(frozen=True, slots=True)
class Refuse:
    reason: Refusal


Verdict = Admit | Park | Refuse


def admission(
    hello: Hello,
    *,
    over: int,
    expected: Expected | None,
    arrived: Collection[tuple[WorkerId, Direction]],
) -> Verdict:
    """`over` is the newest ended generation, `arrived` the channels that are connected already."""
    if hello.version != VERSION:
        return Refuse(Refusal.VERSION)
    if hello.generation <= over:
        return Refuse(Refusal.OVER)
    if expected is None or hello.generation > expected.generation:
        return Park()
    objection = _objection(hello, expected, arrived)
    return Admit() if objection is None else Refuse(objection)


def _objection(
    hello: Hello, expected: Expected, arrived: Collection[tuple[WorkerId, Direction]]
) -> Refusal | None:
    # Compared in constant time, so that the answer's delay tells nothing about the token.
    if not hmac.compare_digest(hello.token.encode(), expected.token.encode()):
        return Refusal.TOKEN
    channel = (hello.sender, hello.direction)
    if channel not in expected.channels:
        return Refusal.UNEXPECTED
    if channel in arrived:
        return Refusal.DUPLICATE
    return None
