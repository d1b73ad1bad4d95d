"""One connection to the coordinator, for workers and agents: handshake, order, heartbeats.

A thread reads, tells each message to a listener, and says Heartbeat when it is time. It knows no
protocol beyond that. `send` may be called from any thread; messages go out in the order of calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from everstep.core.errors import CoordinatorLost, CoordinatorRefused, MessageInvalid
from everstep.membership.messages import (
    MAX_MESSAGE_BYTES,
    SUBPROTOCOL,
    Decoder,
    Heartbeat,
    Message,
    encode,
)

RETRY_EVERY_S = 0.1
"""How often an address where nobody listens yet is tried again."""

CLOSE_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    heartbeat_s: float = 1.0
    """Must be well below the coordinator's patience (`lose_after_s`)."""

    connect_within_s: float = 20.0
    source_host: str | None = None
    """The local address to connect from; None for whatever the machine picks."""


Incoming = TypeVar("Incoming")


class Link(Generic[Incoming]):
    """Connected from the start; `open_link` makes one. `start` begins to read."""

    def __init__(
        self,
        opening: AbstractContextManager[ClientConnection],
        decoder: Decoder[Incoming],
        *,
        heartbeat_s: float,
    ) -> None:
        self._opened = ExitStack()
        self._connection = connection = self._opened.enter_context(opening)
        self._decoder = decoder
        self._heartbeat_s = heartbeat_s
        self._reader: threading.Thread | None = None
        host, port = connection.remote_address[:2]
        self.address = f"{host}:{port}"
        self.local_host = str(connection.local_address[0])
        """This machine's address as seen on the way to the coordinator."""

    def start(
        self, *, on_message: Callable[[Incoming], None], on_closed: Callable[[str], None]
    ) -> None:
        """Reads until the connection ends, then says why, once. Both are called on the reader."""
        self._reader = threading.Thread(
            target=self._read, args=(on_message, on_closed), name="everstep-link", daemon=True
        )
        self._reader.start()

    def send(self, message: Message) -> None:
        try:
            self._connection.send(encode(message))
        except ConnectionClosed as error:
            raise CoordinatorLost(self.address, why=_why(error)) from error

    def close(self) -> None:
        """Says goodbye: what was sent before has been handed over when this returns."""
        self._opened.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(CLOSE_WITHIN_S)

    def _read(
        self, on_message: Callable[[Incoming], None], on_closed: Callable[[str], None]
    ) -> None:
        why = "closed"
        beat_at_s = time.monotonic() + self._heartbeat_s
        try:
            while True:
                try:
                    frame = self._connection.recv(timeout=max(0.0, beat_at_s - time.monotonic()))
                    on_message(self._decoder.decode(frame))
                except TimeoutError:
                    self._connection.send(encode(Heartbeat()))
                    beat_at_s = time.monotonic() + self._heartbeat_s
        except ConnectionClosed as error:
            why = _why(error)
        except MessageInvalid as error:
            why = str(error)
            self._connection.close()
        finally:
            on_closed(why)


def _why(error: ConnectionClosed) -> str:
    frame = error.rcvd
    return "it went away" if frame is None else frame.reason or f"it closed ({frame.code})"


def open_link(
    address: str,
    path: str,
    decoder: Decoder[Incoming],
    *,
    token: str = "",
    settings: LinkSettings | None = None,
) -> Link[Incoming]:
    """Connects to `path` at `address`, trying again while nobody listens there yet."""
    settings = settings or LinkSettings()
    deadline_s = time.monotonic() + settings.connect_within_s
    while True:
        try:
            opening = _connect(address, path, token, settings)
            return Link(opening, decoder, heartbeat_s=settings.heartbeat_s)
        except ConnectionRefusedError as error:
            if time.monotonic() + RETRY_EVERY_S > deadline_s:
                why = f"nobody listens there (tried for {settings.connect_within_s:.1f} s)"
                raise CoordinatorLost(address, why=why) from error
            time.sleep(RETRY_EVERY_S)
        except InvalidStatus as error:
            reason = bytes(error.response.body or b"").decode(errors="replace")
            status = error.response.status_code
            raise CoordinatorRefused(address, status=status, why=reason) from None
        except (OSError, WebSocketException) as error:
            raise CoordinatorLost(address, why=str(error)) from error


def _connect(
    address: str, path: str, token: str, settings: LinkSettings
) -> AbstractContextManager[ClientConnection]:
    return connect(
        f"ws://{address}{path}",
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        additional_headers={"Authorization": f"Bearer {token}"} if token else None,
        compression=None,
        max_size=MAX_MESSAGE_BYTES,
        open_timeout=settings.connect_within_s,
        close_timeout=CLOSE_WITHIN_S,
        # Our own heartbeats tell more: they come from the thread that handles messages.
        ping_interval=None,
        # Training traffic has no business in a web proxy that the environment names.
        proxy=None,
        source_address=(settings.source_host, 0) if settings.source_host else None,
    )
