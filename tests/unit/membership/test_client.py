"""What a worker's client says when its connection is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from everstep.core.errors import CoordinatorLost, CoordinatorStopped
from everstep.membership import messages as m
from everstep.membership.client import Client
from everstep.membership.link import Link


class BrokenLink:
    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.speaking = threading.RLock()

    def start(
        self,
        *,
        greet: Callable[[], Any],
        on_message: Callable[[Any], None],
        on_closed: Callable[[str], None],
    ) -> None:
        del greet
        self.on_message, self.on_closed = on_message, on_closed

    def expect_end(self) -> None:
        """A Stop was heard."""

    def send(self, message: m.Message) -> None:
        del message
        raise CoordinatorLost(self.address, why="it went away")


@pytest.fixture
def link() -> BrokenLink:
    return BrokenLink()


@pytest.fixture
def client(link: BrokenLink) -> Client:
    hello = m.Hello(uid="a", number=0, pid=1, host="h", data_address="h:1")
    return Client(cast(Link[m.ToWorker], link), hello=hello)


def test_a_message_that_cannot_leave_raises_why_the_connection_broke(client: Client) -> None:
    with pytest.raises(CoordinatorLost, match="it went away"):
        client.send(m.Finished())


def test_after_the_end_of_the_job_a_late_failure_is_not_a_lost_coordinator(
    client: Client, link: BrokenLink
) -> None:
    """Several workers often fail together. Whoever came after the coordinator had closed took it
    for lost and printed its own traceback, a second one. It was told of the end, so it is silent.
    """
    link.on_message(m.Stop("worker 0:1 raised", 1))
    link.on_closed("it closed (1000)")
    with pytest.raises(CoordinatorStopped, match="worker 0:1 raised"):
        client.send(m.Failed("Traceback", "train.py:3"))
