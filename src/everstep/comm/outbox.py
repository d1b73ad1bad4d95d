"""The sending end of one channel: a queue that the caller fills and a thread empties.

Small messages skip the queue when it is empty: one system call in the caller's thread is cheaper
than waking another. The order is that of the calls either way. A message is queued by reference,
so the queue costs no memory that the caller does not hold anyway.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Sequence

from everstep.comm.framing import Direction
from everstep.comm.reader import Reader
from everstep.comm.reading import End
from everstep.comm.streams import cut, say_bye, send_all, send_some
from everstep.core.errors import GenerationEnded, PeerLost, PeerSilent
from everstep.core.ids import WorkerId

INLINE_BYTES = 256 << 10
"""Up to this size the caller sends itself; copying more into the kernel would hold up its work."""

_JOIN_S = 5.0


class Outbox:
    def __init__(
        self,
        stream: socket.socket,
        *,
        generation: int,
        peer: WorkerId,
        direction: Direction,
        capacity: int,
        reader: Reader,
    ) -> None:
        self._stream = stream
        self._generation = generation
        self._peer = peer
        self._direction = direction
        self._capacity = capacity
        self._queue: deque[Sequence[memoryview]] = deque()
        self._changed = threading.Condition()
        self._has_ended = False
        self._broken_by: End | None = None
        self._reader = reader
        reader.watch(stream, self._hear_end)
        self._thread: threading.Thread | None = None

    def put(self, buffers: Sequence[memoryview], *, key: str, timeout_s: float) -> None:
        """Sends or queues one message; waits only while `capacity` messages are queued."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._is_over() or len(self._queue) < self._capacity, timeout_s
            )
            self._check(key)
            if not has_room:
                awaited = f"room to send {self._direction} {key!r} ({self._capacity} queued)"
                raise PeerSilent([self._peer], awaited=awaited, waited_s=timeout_s)
            left = self._send_inline(buffers, key=key)
            if left:
                self._queue.append(left)
                self._wake_thread()

    def flush(self, *, timeout_s: float) -> None:
        """Waits until the kernel has every queued byte."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or not self._queue, timeout_s)
            if not self._queue:
                return
            self._check("flush")
            awaited = f"{len(self._queue)} queued {self._direction} messages to be taken"
            raise PeerSilent([self._peer], awaited=awaited, waited_s=timeout_s)

    def end(self) -> None:
        """Frees whoever waits here, at once. Idempotent, from any thread."""
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            # With messages queued, a frame may be half-way out, and this would land inside it.
            if not self._queue:
                say_bye(self._stream)
            self._changed.notify_all()
        cut(self._stream)

    def close(self) -> None:
        self.end()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._queue.clear()
        self._stream.close()

    def _is_over(self) -> bool:
        return self._has_ended or self._broken_by is not None

    def _check(self, key: str) -> None:
        if self._has_ended:
            raise GenerationEnded(self._generation)
        if self._broken_by is not None:
            raise self._lost(key, end=self._broken_by)

    def _hear_end(self) -> None:
        """Called by the reader. The peer says nothing on this stream except goodbye.

        Without it, a message to a dead peer would vanish in the kernel without an error.
        """
        self._reader.unwatch(self._stream)
        try:
            last_word = self._stream.recv(1, socket.MSG_DONTWAIT)
        except OSError as error:
            self._break(End(cause=str(error)))
            return
        has_left = last_word != b""
        cause = "it left the generation" if has_left else "its end of the channel closed"
        self._break(End(cause=cause, has_left=has_left))

    def _send_inline(self, buffers: Sequence[memoryview], *, key: str) -> Sequence[memoryview]:
        if self._queue or sum(map(len, buffers)) > INLINE_BYTES:
            return buffers
        try:
            return send_some(self._stream, buffers, flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return buffers
        except OSError as error:
            raise self._lost(key, end=End(cause=str(error))) from error

    def _wake_thread(self) -> None:
        if self._thread is None:
            name = f"everstep send {self._direction} to {self._peer}"
            self._thread = threading.Thread(target=self._drain, name=name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _drain(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over() or self._queue)
                if self._is_over():
                    return
                buffers = self._queue[0]
            try:
                send_all(self._stream, buffers)
            except OSError as error:
                self._break(End(cause=str(error)))
                return
            with self._changed:
                # Only now: while it is being sent, later messages must queue up behind it.
                self._queue.popleft()
                self._changed.notify_all()

    def _break(self, end: End) -> None:
        with self._changed:
            self._broken_by = self._broken_by or end
            self._changed.notify_all()

    def _lost(self, key: str, *, end: End) -> PeerLost:
        during = f"send of {self._direction} {key!r}"
        return PeerLost([self._peer], during=during, cause=end.cause, has_left=end.has_left)
