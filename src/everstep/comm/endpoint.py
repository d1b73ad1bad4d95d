"""A worker's door: the listening socket through which each generation's channels come in.

It knows one open generation at a time. A connection for an earlier one is refused, for a later one
parked until that opens, so no byte of one generation ever reaches another.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from everstep.comm.admission import Admit, Expected, Park, Refuse, admission
from everstep.comm.channels import ChannelId, Channels, Limits
from everstep.comm.dialing import Dialing
from everstep.comm.framing import (
    MAX_HELLO_BYTES,
    Hello,
    Refusal,
    Refused,
    Welcome,
    encode,
)
from everstep.comm.inbox import Inbox
from everstep.comm.lifetime import Lifetime
from everstep.comm.outbox import Outbox
from everstep.comm.reader import Reader
from everstep.comm.streams import StreamEnded, cut, read_header
from everstep.core.errors import GenerationEnded, PeerSilent, ProtocolBroken
from everstep.core.ids import WorkerId

_HELLO_S = 5.0
"""A connection that has not said hello by then is closed."""

_MAX_GREETED = 1024
"""Connections that may be saying hello or be parked at once; more are closed unheard."""

_JOIN_S = 5.0


class Endpoint:
    def __init__(
        self, host: str = "127.0.0.1", *, park_s: float = 60.0, limits: Limits | None = None
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=256)
        name, port = self._listener.getsockname()[:2]
        self.address = f"[{name}]:{port}" if family == socket.AF_INET6 else f"{name}:{port}"
        self._park_s = park_s
        self._limits = limits or Limits()
        self._changed = threading.Condition()
        self._is_closed = False
        self._over = -1
        self._expected: Expected | None = None
        self._arrived: dict[ChannelId, socket.socket] = {}
        self._greeted: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="everstep accept", daemon=True)
        self._thread.start()

    def open(
        self,
        *,
        generation: int,
        me: WorkerId,
        addresses: Mapping[WorkerId, str],
        sends: Collection[ChannelId],
        receives: Collection[ChannelId],
        token: str,
        timeout_s: float,
        device: torch.device | str = "cpu",
        lifetime: Lifetime | None = None,
    ) -> Channels:
        """Connects every channel of a generation; returns when both ends of each are there.

        An end of `lifetime` frees it with `GenerationEnded`, and later poisons the channels.
        """
        lifetime = lifetime or Lifetime(generation)
        lifetime.check()
        deadline_s = time.monotonic() + timeout_s
        dialing = Dialing(generation=generation, me=me, token=token, deadline_s=deadline_s)
        self._expect(Expected(generation=generation, token=token, channels=frozenset(receives)))
        try:
            with lifetime.freeing(lambda: self._abandon(dialing, generation)):
                dialing.dial(sends, addresses)
                outgoing = dialing.welcomed()
                incoming = self._incoming(generation, deadline_s=deadline_s)
            _check_complete(sends, outgoing, receives, incoming, waited_s=timeout_s)
        except BaseException:
            dialing.close()
            self._finish(generation)
            raise
        channels = self._build(generation, outgoing, incoming, device=torch.device(device))
        lifetime.on_end(channels.poison)
        return channels

    def close(self) -> None:
        """Closes the door. Channels that are open stay open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            greeted = dict(self._greeted)
        cut(self._listener)
        for stream in greeted:
            cut(stream)
        for thread in (self._thread, *greeted.values()):
            thread.join(_JOIN_S)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _expect(self, expected: Expected) -> None:
        with self._changed:
            if expected.generation <= self._over:
                raise GenerationEnded(expected.generation)
            # Whatever was open before is over: a worker is in one generation at a time.
            self._over = expected.generation - 1
            self._expected = expected
            self._arrived = {}
            self._changed.notify_all()

    def _finish(self, generation: int) -> None:
        with self._changed:
            if self._expected is not None and self._expected.generation <= generation:
                self._expected = None
                for stream in self._arrived.values():
                    stream.close()
                self._arrived = {}
            self._over = max(self._over, generation)
            self._changed.notify_all()

    def _abandon(self, dialing: Dialing, generation: int) -> None:
        dialing.abandon()
        self._finish(generation)

    def _incoming(self, generation: int, *, deadline_s: float) -> dict[ChannelId, socket.socket]:
        """Waits until every expected channel came in, or the deadline; those that came."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over >= generation or self._is_complete(),
                max(deadline_s - time.monotonic(), 0.0),
            )
            if self._over >= generation:
                raise GenerationEnded(generation)
            if self._expected is None or not self._is_complete():
                return dict(self._arrived)
            # They belong to the channels now, and no more may come.
            arrived, self._arrived = self._arrived, {}
            self._expected = replace(self._expected, channels=frozenset())
            return arrived

    def _is_complete(self) -> bool:
        return self._expected is not None and self._arrived.keys() == self._expected.channels

    def _build(
        self,
        generation: int,
        outgoing: Mapping[ChannelId, socket.socket],
        incoming: Mapping[ChannelId, socket.socket],
        *,
        device: torch.device,
    ) -> Channels:
        limits = self._limits
        reader = Reader()
        return Channels(
            generation=generation,
            outboxes={
                (peer, direction): Outbox(
                    stream,
                    generation=generation,
                    peer=peer,
                    direction=direction,
                    capacity=limits.capacity,
                    reader=reader,
                )
                for (peer, direction), stream in outgoing.items()
            },
            inboxes={
                (peer, direction): Inbox(
                    stream,
                    generation=generation,
                    peer=peer,
                    direction=direction,
                    read_ahead=limits.read_ahead,
                    reader=reader,
                )
                for (peer, direction), stream in incoming.items()
            },
            reader=reader,
            device=device,
            on_end=lambda: self._finish(generation),
        )

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                with self._changed:
                    # Out of descriptors, or a caller that hung up: the door stays open.
                    if self._changed.wait_for(lambda: self._is_closed, 0.05):
                        return
                continue
            thread = threading.Thread(
                target=self._greet, args=(stream,), name="everstep greet", daemon=True
            )
            with self._changed:
                if self._is_closed or len(self._greeted) >= _MAX_GREETED:
                    stream.close()
                    continue
                self._greeted[stream] = thread
                thread.start()

    def _greet(self, stream: socket.socket) -> None:
        is_admitted = False
        try:
            stream.settimeout(_HELLO_S)
            header = read_header(stream, limit_bytes=MAX_HELLO_BYTES)
            if isinstance(header, Hello):
                is_admitted = self._admit(header, stream)
        except (OSError, StreamEnded, ProtocolBroken):
            pass  # A stranger, or a peer that died; whoever needs it notices that it is missing.
        finally:
            with self._changed:
                del self._greeted[stream]
            if not is_admitted:
                stream.close()

    def _admit(self, hello: Hello, stream: socket.socket) -> bool:
        deadline_s = time.monotonic() + self._park_s
        with self._changed:
            while True:
                verdict = admission(
                    hello, over=self._over, expected=self._expected, arrived=self._arrived
                )
                left_s = deadline_s - time.monotonic()
                if self._is_closed:
                    verdict = Refuse(Refusal.CLOSED)
                elif verdict == Park() and left_s <= 0:
                    verdict = Refuse(Refusal.LATE)
                match verdict:
                    case Park():
                        self._changed.wait(left_s)
                    case Refuse(reason=reason):
                        stream.sendall(encode(Refused(reason=reason)))
                        return False
                    case Admit():
                        stream.sendall(encode(Welcome()))
                        stream.settimeout(None)
                        self._arrived[hello.sender, hello.direction] = stream
                        self._changed.notify_all()
                        return True


def _check_complete(
    sends: Collection[ChannelId],
    outgoing: Collection[ChannelId],
    receives: Collection[ChannelId],
    incoming: Collection[ChannelId],
    *,
    waited_s: float,
) -> None:
    not_accepted = [channel for channel in sends if channel not in outgoing]
    not_arrived = [channel for channel in receives if channel not in incoming]
    if not not_accepted and not not_arrived:
        return
    names = [f"{direction} to {peer}" for peer, direction in not_accepted]
    names += [f"{direction} from {peer}" for peer, direction in not_arrived]
    peers = sorted({peer for peer, _ in (*not_accepted, *not_arrived)})
    raise PeerSilent(peers, awaited=f"the channels {', '.join(names)}", waited_s=waited_s)
