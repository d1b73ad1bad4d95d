"""What goes into the world and what comes out of it. Plain values: the shell does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from everstep.membership.messages import FromAgent, FromWorker, ToAgent, ToWorker
from everstep.membership.takeover import Stock


@dataclass(frozen=True, slots=True)
class Received:
    uid: str
    message: FromWorker | FromAgent


@dataclass(frozen=True, slots=True)
class Disconnected:
    uid: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """Somebody outside the job wants it to end: a signal, a failed shell."""

    why: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class TakenOver:
    """There was a coordinator before this one. Comes at most once, before any generation."""

    stock: Stock


Input: TypeAlias = Received | Disconnected | Tick | StopAsked | TakenOver


@dataclass(frozen=True, slots=True)
class Send:
    uid: str
    message: ToWorker | ToAgent


@dataclass(frozen=True, slots=True)
class Emit:
    """A line for the events file."""

    event: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the job ended."""

    exit_code: int
    why: str
    traceback: str | None = None
    """Of the user's code, when that is what ended it."""


@dataclass(frozen=True, slots=True)
class End:
    """Comes once. Messages sent before it, the Stops among them, are still to be delivered."""

    outcome: Outcome


Effect: TypeAlias = Send | Emit | End
