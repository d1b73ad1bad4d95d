"""The receiving end of one channel: messages are read ahead into a bounded queue.

Reading ahead is what "receives are posted early" means here: the next tensors are in our memory
while the worker computes. The generation's `Reader` does it, for all channels. A worker that waits
for a message reads the stream itself, because being woken by another thread costs more than the
message; while it waits, the stream is off the reader's watch. A lock says whose turn it is to read,
and order is kept because only the holder of the turn reads and fills the queue.

What was read before the peer closed stays deliverable, in order; the end of the stream is an error
only for whoever needs more.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque

from everstep.comm.framing import Direction
from everstep.comm.reader import Reader
from everstep.comm.reading import End, Message, Source, messages
from everstep.comm.streams import cut, limit_waits, say_bye
from everstep.core.errors import GenerationEnded, PeerLost, PeerSilent, ProtocolBroken
from everstep.core.ids import WorkerId


class Inbox:
    def __init__(
        self,
        stream: socket.socket,
        *,
        generation: int,
        peer: WorkerId,
        direction: Direction,
        read_ahead: int,
        reader: Reader,
    ) -> None:
        self._stream = stream
        self._generation = generation
        self._peer = peer
        self._direction = direction
        self._read_ahead = read_ahead
        self._reader = reader
        self._source = Source(stream)
        self._messages = messages(self._source)
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._queue: deque[Message] = deque()
        self._is_awaited = False
        self._is_watched = False
        self._has_ended = False
        self._end: End | None = None
        with self._lock:
            self._update_watch()

    def get(self, key: str, *, timeout_s: float) -> Message:
        """The next message, which must have this key."""
        began_s = time.monotonic()
        message = self._pop() or self._read_myself(deadline_s=began_s + timeout_s)
        waited_s = time.monotonic() - began_s
        if self._has_ended:
            raise GenerationEnded(self._generation)
        if message is None:
            raise self._nothing_came(key, waited_s=waited_s)
        if message.key != key:
            raise ProtocolBroken(
                f"worker {self._peer} sent {self._direction} {message.key!r}"
                f" where {key!r} was expected"
            )
        return message

    def end(self) -> None:
        """Frees whoever waits here, at once. Idempotent, from any thread."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            self._update_watch()
        say_bye(self._stream)
        cut(self._stream)

    def close(self) -> None:
        self.end()
        with self._turn:  # The reader may be half-way through a read.
            self._stream.close()
        self._queue.clear()

    def _pop(self) -> Message | None:
        with self._lock:
            if not self._queue:
                return None
            message = self._queue.popleft()
            self._update_watch()
            return message

    def _read_myself(self, *, deadline_s: float) -> Message | None:
        with self._lock:
            self._is_awaited = True
            self._update_watch()
        try:
            with self._turn:  # Nobody holds it while waiting for bytes, except here.
                return self._pop() or self._wait_for_next(deadline_s)
        finally:
            with self._lock:
                self._is_awaited = False
                self._update_watch()

    def _wait_for_next(self, deadline_s: float) -> Message | None:
        self._source.may_wait = True
        try:
            while (left_s := deadline_s - time.monotonic()) > 0 and not self._is_over():
                limit_waits(self._stream, left_s)
                message = self._next()
                if message is not None:
                    return message
            return None
        finally:
            self._source.may_wait = False

    def _next(self) -> Message | None:
        """Reads on. None when bytes are missing still and when no more will come."""
        if self._is_over():
            return None
        found = next(self._messages)
        if isinstance(found, End):
            self._end = found
            return None
        return found

    def _is_over(self) -> bool:
        return self._has_ended or self._end is not None

    def _read_without_waiting(self) -> None:
        """What the reader does when bytes have arrived that nobody waits for."""
        if not self._turn.acquire(blocking=False):
            return  # Somebody came to wait meanwhile, and reads.
        try:
            message = self._next()
            with self._lock:
                if message is not None:
                    self._queue.append(message)
                self._update_watch()
        finally:
            self._turn.release()

    def _update_watch(self) -> None:
        """Call with the lock held, after any change to what it looks at."""
        should_watch = (
            not self._is_awaited and not self._is_over() and len(self._queue) < self._read_ahead
        )
        if should_watch and not self._is_watched:
            self._reader.watch(self._stream, self._read_without_waiting)
        elif self._is_watched and not should_watch:
            self._reader.unwatch(self._stream)
        self._is_watched = should_watch

    def _nothing_came(self, key: str, *, waited_s: float) -> Exception:
        match self._end:
            case None:
                awaited = f"{self._direction} {key!r}"
                return PeerSilent([self._peer], awaited=awaited, waited_s=waited_s)
            case End(is_violation=True, cause=cause):
                return ProtocolBroken(f"worker {self._peer} sent {cause}")
            case End(cause=cause, has_left=has_left):
                during = f"receive of {self._direction} {key!r}"
                return PeerLost([self._peer], during=during, cause=cause, has_left=has_left)
