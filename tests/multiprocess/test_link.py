"""A connection that is made anew when the coordinator comes back, against a bare server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from crew import PROFILE, job_facts
from everstep.core.errors import CoordinatorLost, WaitTimedOut
from everstep.membership import messages as m
from everstep.membership.client import Client, connect
from everstep.membership.codec import SUBPROTOCOL, encode, from_worker
from everstep.membership.link import LinkSettings

pytestmark = pytest.mark.timeout(30)

HELLO = m.Hello(uid="u", number=0, pid=1, host="h", data_address="h:1")
WELCOME = m.Welcome(replica=0, stage=0, replicas=1, stages=1)


class Server:
    """Keeps what it hears, welcomes whoever says Hello, and can be made to vanish."""

    def __init__(self, port: int = 0) -> None:
        self.heard: list[m.FromWorker] = []
        self._connections: list[ServerConnection] = []
        self._server = serve(
            self._converse, "127.0.0.1", port, subprotocols=[Subprotocol(SUBPROTOCOL)]
        )
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _converse(self, connection: ServerConnection) -> None:
        self._connections.append(connection)
        with suppress(ConnectionClosed):
            for frame in connection:
                message = from_worker.decode(frame)
                self.heard.append(message)
                if isinstance(message, m.Hello):
                    connection.send(encode(WELCOME))

    def say(self, message: m.ToWorker) -> None:
        self._connections[-1].send(encode(message))

    def vanish(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # the other side was quicker
                connection.socket.shutdown(2)
        self._server.shutdown()
        self._thread.join(5)

    def wait_heard(self, kind: type[m.FromWorker]) -> m.FromWorker:
        wait_until(lambda: any(isinstance(message, kind) for message in self.heard))
        return next(message for message in self.heard if isinstance(message, kind))


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_reached():
        assert time.monotonic() < deadline_s, "not reached in 10 s"
        time.sleep(0.01)


@contextmanager
def running(port: int = 0) -> Iterator[Server]:
    server = Server(port)
    try:
        yield server
    finally:
        server.vanish()


def joined(server: Server, stack: ExitStack, *, return_within_s: float = 10) -> Client:
    settings = LinkSettings(return_within_s=return_within_s)
    client = connect(f"127.0.0.1:{server.port}", hello=HELLO, settings=settings)
    stack.callback(client.close)
    client.wait_welcome(timeout_s=10)
    client.send(m.Ready(job_facts()))
    server.wait_heard(m.Ready)
    return client


def test_a_coordinator_that_comes_back_is_told_what_was_said_meanwhile() -> None:
    with ExitStack() as stack:
        with running() as server:
            client = joined(server, stack)
        wait_until(lambda: client.is_away)
        client.send(m.Profile(1, PROFILE))
        again = stack.enter_context(running(server.port))
        rejoin = again.wait_heard(m.Rejoin)
        assert isinstance(rejoin, m.Rejoin)
        assert (rejoin.uid, rejoin.place, rejoin.job) == ("u", (0, 0), job_facts())
        assert rejoin.profile is not None
        assert again.heard[0] == rejoin
        wait_until(lambda: not client.is_away)
        client.send(m.Broken(0, "still there"))
        again.wait_heard(m.Broken)


def test_time_without_a_coordinator_does_not_count_as_waiting() -> None:
    with ExitStack() as stack:
        with running() as server:
            client = joined(server, stack)
        wait_until(lambda: client.is_away)
        waited: list[BaseException] = []

        def wait() -> None:
            try:
                client.wait_watermark(0, timeout_s=0.1)
            except WaitTimedOut as error:
                waited.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive()
        again = stack.enter_context(running(server.port))
        again.wait_heard(m.Rejoin)
        waiter.join(10)
        assert len(waited) == 1


def test_a_coordinator_that_stays_away_ends_every_wait_in_the_end() -> None:
    with ExitStack() as stack:
        with running() as server:
            client = joined(server, stack, return_within_s=0.3)
        with pytest.raises(CoordinatorLost, match=r"did not come back within 0\.3 s"):
            client.wait_watermark(0, timeout_s=10)
        with pytest.raises(CoordinatorLost):
            client.send(m.Finished())


def test_last_words_are_said_before_the_process_ends() -> None:
    with ExitStack() as stack:
        with running() as server:
            client = joined(server, stack)
        wait_until(lambda: client.is_away)
        client.send(m.Failed("Traceback", "train.py:1"))
        leaving = threading.Thread(target=client.close)
        leaving.start()
        again = stack.enter_context(running(server.port))
        again.wait_heard(m.Failed)
        assert [type(message) for message in again.heard] == [m.Rejoin, m.Failed]
        leaving.join(10)
        assert not leaving.is_alive()


def test_after_a_stop_nobody_comes_back() -> None:
    with ExitStack() as stack:
        with running() as server:
            client = joined(server, stack)
            server.say(m.Stop("over", 0))
            wait_until(lambda: client._stop is not None)
        again = stack.enter_context(running(server.port))
        client.close()
        assert again.heard == []
