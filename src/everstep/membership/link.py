"""The way to the coordinator, for workers and agents: handshake, order, heartbeats, coming back.

A thread reads, tells each message to a listener, and says Heartbeat when it is time. When the
connection breaks it makes another to the same address, where the coordinator may be started again,
and greets anew. It knows no protocol beyond that. `send` may be called from any thread; messages go
out in the order of calls, and those said while nobody listens go nowhere: the greeting must tell.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from everstep.core.errors import (
    CoordinatorGone,
    CoordinatorLost,
    CoordinatorRefused,
    MessageInvalid,
)
from everstep.membership.codec import MAX_MESSAGE_BYTES, SUBPROTOCOL, Decoder, encode
from everstep.membership.messages import Heartbeat, Message

RETRY_EVERY_S = 0.1
"""How often an address where nobody listens yet is tried again; after a break it gets longer."""

LONGEST_RETRY_S = 1.0
RETURN_WITHIN_S = 600.0
"""Time enough for a person to start a coordinator again."""

CLOSE_WITHIN_S = 1.0
AGAINST_THE_RULES = 1008
"""The close code of a coordinator that will not talk to us, however often we come back."""

FIRST_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    heartbeat_s: float = 1.0
    """Must be well below the coordinator's patience (`lose_after_s`)."""

    connect_within_s: float = 20.0
    return_within_s: float = RETURN_WITHIN_S
    """How long a coordinator that went away is waited for; 0 for not at all."""

    source_host: str | None = None
    """The local address to connect from; None for whatever the machine picks."""


Incoming = TypeVar("Incoming")
Greet = Callable[[], Iterable[Message]]


class Link(Generic[Incoming]):
    """Connected from the start; `open_link` makes one. `start` greets and begins to read."""

    def __init__(
        self,
        dial: Callable[[], ClientConnection],
        decoder: Decoder[Incoming],
        *,
        settings: LinkSettings,
    ) -> None:
        self._dial = dial
        self._decoder = decoder
        self._settings = settings
        self.speaking = threading.RLock()
        """Held while something is said. Hold it to note what is said in the same breath, so that a
        greeting holds either all of it or nothing."""

        self._connection: ClientConnection | None = dial()
        self._is_here = threading.Event()
        self._is_over = threading.Event()
        self._lost: CoordinatorGone | None = None
        self._reader: threading.Thread | None = None
        host, port = self._connection.remote_address[:2]
        self.address = f"{host}:{port}"
        self.local_host = str(self._connection.local_address[0])
        """This machine's address as seen on the way to the coordinator."""

    def start(
        self,
        *,
        greet: Greet,
        on_message: Callable[[Incoming], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Reads until there is nothing more to come, then says why, once.

        `greet` gives what is said first on each connection. After the first, all are called on the
        reader's thread.
        """
        assert self._connection is not None
        self._greet(self._connection, greet)
        self._reader = threading.Thread(
            target=self._serve,
            args=(self._connection, greet, on_message, on_closed),
            name="everstep-link",
            daemon=True,
        )
        self._reader.start()

    @property
    def is_away(self) -> bool:
        """The coordinator is gone and may come back."""
        return not self._is_here.is_set() and not self._is_over.is_set()

    def send(self, message: Message) -> None:
        """Never waits for a coordinator that went away; raises when it is gone for good."""
        with self.speaking:
            if self._lost is not None:
                raise self._lost
            if self._connection is not None:
                _say(self._connection, message)

    def expect_end(self) -> None:
        """The coordinator has said its last word: a closed connection stays closed."""
        self._is_over.set()

    def wait_back(self) -> None:
        """Until the coordinator has been greeted again, or is gone for good."""
        self._is_here.wait(self._settings.return_within_s + self._settings.connect_within_s)

    def close(self) -> None:
        """Says goodbye: what was sent before has been handed over when this returns."""
        self._is_over.set()
        with self.speaking:
            connection = self._connection
        if connection is not None:
            connection.close()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(CLOSE_WITHIN_S)

    def _serve(
        self,
        connection: ClientConnection,
        greet: Greet,
        on_message: Callable[[Incoming], None],
        on_closed: Callable[[str], None],
    ) -> None:
        patience = _Patience(self._settings.return_within_s)
        while True:
            why, may_return = self._read(connection, on_message)
            connection.close()
            with self.speaking:
                self._is_here.clear()
                self._connection = None
            if not may_return or self._is_over.is_set():
                break
            returned = self._come_back(patience, greet)
            if isinstance(returned, str):
                why = f"{why}, and {returned}"
                break
            connection = returned
        with self.speaking:
            self._lost = CoordinatorLost(self.address, why=why)
            self._is_over.set()
            self._is_here.set()  # nobody need wait for that any more
        on_closed(why)

    def _read(
        self, connection: ClientConnection, on_message: Callable[[Incoming], None]
    ) -> tuple[str, bool]:
        """Until the connection ends: why, and whether it makes sense to come back."""
        beat_at_s = time.monotonic() + self._settings.heartbeat_s
        try:
            while True:
                try:
                    frame = connection.recv(timeout=max(0.0, beat_at_s - time.monotonic()))
                    on_message(self._decoder.decode(frame))
                except TimeoutError:
                    connection.send(encode(Heartbeat()))
                    beat_at_s = time.monotonic() + self._settings.heartbeat_s
        except ConnectionClosed as error:
            frame_of_theirs = error.rcvd
            is_final = frame_of_theirs is not None and frame_of_theirs.code == AGAINST_THE_RULES
            return _why(error), not is_final
        except MessageInvalid as error:
            return str(error), False

    def _come_back(self, patience: _Patience, greet: Greet) -> ClientConnection | str:
        """A new connection, or why there is none."""
        patience.begin()
        while not self._is_over.wait(patience.next_pause_s()):
            if patience.is_over:
                return f"did not come back within {self._settings.return_within_s:.1f} s"
            try:
                connection = self._dial()
            except CoordinatorRefused as error:
                if error.status < FIRST_SERVER_ERROR:
                    return f"then it refused us: {error.why}"
            except CoordinatorLost:
                pass  # not back yet
            else:
                self._greet(connection, greet)
                return connection
        return "we left meanwhile"

    def _greet(self, connection: ClientConnection, greet: Greet) -> None:
        with self.speaking:
            for message in greet():
                _say(connection, message)
            self._connection = connection
            self._is_here.set()


class _Patience:
    """How long, and how often, a coordinator that went away is looked for.

    A connection that breaks at once does not count as a return, so that a coordinator which falls
    over each greeting is not called without pause.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_s = 0.0
        self._tried_s = float("-inf")
        self._pause_s = RETRY_EVERY_S

    def begin(self) -> None:
        now_s = time.monotonic()
        if now_s - self._tried_s > LONGEST_RETRY_S:
            self._began_s, self._pause_s = now_s, RETRY_EVERY_S

    def next_pause_s(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_RETRY_S)
        self._tried_s = time.monotonic() + pause_s
        return pause_s if self._limit_s > 0 else 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._began_s >= self._limit_s


def _say(connection: ClientConnection, message: Message) -> None:
    # When it is closed the reader finds out too, and comes back with a greeting that tells it.
    with suppress(ConnectionClosed):
        connection.send(encode(message))


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

    def dial() -> ClientConnection:
        return _connect(address, path, token, settings)

    while True:
        try:
            return Link(dial, decoder, settings=settings)
        except CoordinatorLost as error:
            if not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            if time.monotonic() + RETRY_EVERY_S > deadline_s:
                why = f"nobody listens there (tried for {settings.connect_within_s:.1f} s)"
                raise CoordinatorLost(address, why=why) from error
            time.sleep(RETRY_EVERY_S)


def _connect(address: str, path: str, token: str, settings: LinkSettings) -> ClientConnection:
    try:
        # websockets wants it entered; leaving it means no more than `close`.
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
        ).__enter__()
    except InvalidStatus as error:
        reason = bytes(error.response.body or b"").decode(errors="replace")
        status = error.response.status_code
        raise CoordinatorRefused(address, status=status, why=reason) from None
    except (OSError, WebSocketException) as error:
        raise CoordinatorLost(address, why=str(error)) from error
