"""Channels of one generation: one FIFO per ordered pair of workers and direction, over TCP.

Why TCP: any thread can end it at once, and key and shapes travel with the tensors. Small messages
are faster than a gloo 2-rank broadcast; gloo send/recv is slower by ten times or faster by a third,
from run to run; at 4 MB both gloo ways are faster (benchmarks/channels.py).

Why bounded queues cannot deadlock a valid plan. The checker has proved that the plan runs when
sends never block. Here a send blocks only when its channel already holds `capacity` messages that
the peer's worker has not taken. A plan keeps at most its in-flight limit of micro-batches between
F and W on a worker, and each has at most one activation and one gradient under way; so with
`capacity` at or above that limit no send ever blocks, and the queues behave as unbounded ones. How
far the receiver reads ahead plays no part: what it leaves unread stays queued at the sender, by
reference. Each channel has its own stream, so a slow peer holds up nobody else. A
caller that does go beyond `capacity` (a state copied in chunks) gets back-pressure, with a timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from everstep.comm.framing import Direction, Payload, encode
from everstep.comm.inbox import Inbox
from everstep.comm.outbox import Outbox
from everstep.comm.reader import Reader
from everstep.comm.reading import Message
from everstep.comm.streams import host_copy, memory_of, spec_of
from everstep.core.errors import ProtocolBroken
from everstep.core.ids import WorkerId

ChannelId = tuple[WorkerId, Direction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a channel may hold."""

    capacity: int = 1024
    """Messages queued at the sender before a send waits; at least the plan's in-flight limit."""

    read_ahead: int = 8
    """Messages in the receiver's memory before they are asked for."""


class Channels:
    """Made by `Endpoint.open`. `waited_s` adds up the time spent blocked in `receive`."""

    def __init__(
        self,
        *,
        generation: int,
        outboxes: Mapping[ChannelId, Outbox],
        inboxes: Mapping[ChannelId, Inbox],
        reader: Reader,
        device: torch.device,
        on_end: Callable[[], None],
    ) -> None:
        self.generation = generation
        self.waited_s = 0.0
        self._outboxes = outboxes
        self._inboxes = inboxes
        self._reader = reader
        self._device = device
        self._on_end = on_end
        self._is_closed = False

    def send(
        self,
        peer: WorkerId,
        direction: Direction,
        key: str,
        tensors: Sequence[Tensor],
        structure: str = "",
        *,
        timeout_s: float = 60.0,
    ) -> None:
        """Asynchronous, and from the tensors' own memory: do not modify them afterwards."""
        outbox = self._outboxes.get((peer, direction))
        if outbox is None:
            raise ProtocolBroken(f"no channel for {direction} {key!r} to worker {peer}")
        # Copying off an accelerator here, in the caller's thread, keeps the order of its stream.
        on_host = [host_copy(tensor) for tensor in tensors]
        specs = tuple(spec_of(tensor) for tensor in on_host)
        header = encode(Payload(key=key, structure=structure, tensors=specs))
        buffers = [memoryview(header), *(memory_of(tensor) for tensor in on_host)]
        outbox.put([buffer for buffer in buffers if buffer], key=key, timeout_s=timeout_s)

    def receive(
        self, peer: WorkerId, direction: Direction, key: str, *, timeout_s: float
    ) -> Message:
        """The channel's next message, which must have this key."""
        inbox = self._inboxes.get((peer, direction))
        if inbox is None:
            raise ProtocolBroken(f"no channel for {direction} {key!r} from worker {peer}")
        began_s = time.monotonic()
        try:
            message = inbox.get(key, timeout_s=timeout_s)
        finally:
            self.waited_s += time.monotonic() - began_s
        if self._device.type == "cpu":
            return message
        return replace(message, tensors=tuple(each.to(self._device) for each in message.tensors))

    def flush(self, *, timeout_s: float) -> None:
        """Waits until the kernel has all that was sent, so that `close` drops nothing."""
        for outbox in self._outboxes.values():
            outbox.flush(timeout_s=timeout_s)

    def poison(self) -> None:
        """Frees blocked sends and receives with `GenerationEnded`. Idempotent, from any thread."""
        for box in self._boxes():
            box.end()
        self._on_end()

    def close(self) -> None:
        """Poisons, then gives everything back. What is still queued is dropped: `flush` first."""
        if self._is_closed:
            return
        self._is_closed = True
        self.poison()
        self._reader.close()
        for box in self._boxes():
            box.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _boxes(self) -> Iterable[Outbox | Inbox]:
        return (*self._outboxes.values(), *self._inboxes.values())
