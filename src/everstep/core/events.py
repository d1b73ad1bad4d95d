"""The events of a job: one JSON object per line, flushed as written, and told to subscribers.

One thread writes. Subscribers are called on it, in the order they subscribed, so must be quick.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeAlias

Event: TypeAlias = Mapping[str, object]
Subscriber: TypeAlias = Callable[[Event], None]

RECENT_EVENTS = 50
"""Kept in memory for `status`."""


class EventLog:
    """Appends events to a file, when given one, and tells them to whoever subscribed."""

    def __init__(
        self, path: Path | None = None, *, wall_time_s: Callable[[], float] = time.time
    ) -> None:
        self._file: TextIO | None = None if path is None else path.open("a", encoding="utf-8")
        self._wall_time_s = wall_time_s
        self._subscribers: list[Subscriber] = []
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def emit(self, event: str, fields: Mapping[str, object] | None = None) -> None:
        """Writes `event` with its time (seconds since 1970) and fields."""
        record = {"event": event, "time": self._wall_time_s(), **(fields or {})}
        if self._file is not None:
            self._file.write(json.dumps(_finite(record), separators=(",", ":")) + "\n")
            self._file.flush()
        self._recent.append(record)
        for subscriber in self._subscribers:
            subscriber(record)

    def recent(self) -> list[Event]:
        """The newest events, oldest first, fit for JSON."""
        return [event for event in map(_finite, list(self._recent)) if isinstance(event, dict)]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _finite(value: object) -> object:
    """NaN and infinity as null: JSON has no word for them, and readers choke on Python's."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
