"""The connecting side of `Endpoint.open`: dials the peers we send to and waits to be welcomed.

It can be abandoned from another thread at any moment, in the middle of a connect too.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Mapping

from everstep.comm.channels import ChannelId
from everstep.comm.framing import (
    MAX_HELLO_BYTES,
    Direction,
    Hello,
    Refusal,
    Refused,
    Welcome,
    encode,
)
from everstep.comm.streams import StreamEnded, cut, read_header
from everstep.core.errors import GenerationEnded, PeerLost, PeerRefused, ProtocolBroken
from everstep.core.ids import WorkerId

_LEAST_WAIT_S = 0.001
"""After the deadline each remaining peer is still asked once: the error names those missing."""


def parse_address(address: str) -> tuple[str, int]:
    """Reads `127.0.0.1:4711` and `[::1]:4711`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Dialing:
    """Outgoing connections on their way to being channels."""

    def __init__(self, *, generation: int, me: WorkerId, token: str, deadline_s: float) -> None:
        self._generation = generation
        self._me = me
        self._token = token
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._streams: dict[ChannelId, socket.socket] = {}

    def dial(self, channels: Iterable[ChannelId], addresses: Mapping[WorkerId, str]) -> None:
        """Connects to every peer and says hello, without waiting for an answer."""
        for peer, direction in channels:
            host, port = parse_address(addresses[peer])
            family, kind, proto, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            )[0]
            stream = socket.socket(family, kind, proto)
            self._keep((peer, direction), stream)
            try:
                stream.settimeout(self._left_s())
                stream.connect(address)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream.sendall(encode(self._hello(direction)))
            except TimeoutError:
                continue  # It will be missing from those that welcome us.
            except OSError as error:
                raise self._lost(peer, cause=str(error)) from error

    def welcomed(self) -> dict[ChannelId, socket.socket]:
        """Waits for the peers' answers until the deadline; those that came, as blocking streams."""
        answered = {}
        for (peer, direction), stream in self._streams.items():
            stream.settimeout(self._left_s())
            try:
                header = read_header(stream, limit_bytes=MAX_HELLO_BYTES)
            except TimeoutError:
                continue
            except (StreamEnded, OSError) as error:
                raise self._lost(peer, cause=f"its endpoint closed ({error})") from error
            self._check_answer(peer, header)
            stream.settimeout(None)
            answered[peer, direction] = stream
        return answered

    def abandon(self) -> None:
        """Frees whoever dials or waits here. Idempotent, from any thread."""
        with self._lock:
            self._is_abandoned = True
            for stream in self._streams.values():
                cut(stream)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _keep(self, channel: ChannelId, stream: socket.socket) -> None:
        with self._lock:
            self._streams[channel] = stream
            if self._is_abandoned:
                raise GenerationEnded(self._generation)

    def _left_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), _LEAST_WAIT_S)

    def _hello(self, direction: Direction) -> Hello:
        return Hello(
            generation=self._generation, token=self._token, sender=self._me, direction=direction
        )

    def _check_answer(self, peer: WorkerId, header: object) -> None:
        match header:
            case Welcome():
                return
            case Refused(reason=Refusal.OVER):
                raise GenerationEnded(self._generation)
            case Refused(reason=reason):
                raise PeerRefused(peer, generation=self._generation, reason=reason)
            case _:
                raise ProtocolBroken(f"worker {peer} answered with {type(header).__name__}")

    def _lost(self, peer: WorkerId, *, cause: str) -> PeerLost | GenerationEnded:
        if self._is_abandoned:
            return GenerationEnded(self._generation)
        during = f"the opening of generation {self._generation}"
        return PeerLost([peer], during=during, cause=cause)
