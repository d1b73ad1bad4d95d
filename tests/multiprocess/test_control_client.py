"""The worker's side against a real coordinator, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from websockets.sync.client import connect as connect_websocket
from websockets.typing import Subprotocol

from crew import MEETING, job_facts
from everstep.core.errors import (
    CoordinatorLost,
    CoordinatorStopped,
    GenerationEnded,
    WaitTimedOut,
)
from everstep.core.events import Event, EventLog
from everstep.membership import messages as m
from everstep.membership.client import Client, OnHalt, connect
from everstep.membership.codec import SUBPROTOCOL
from everstep.membership.coordinator import Coordinator, start_coordinator
from everstep.membership.facts import StageProfile
from everstep.membership.link import LinkSettings
from everstep.membership.roster import Shape
from everstep.membership.world import World, WorldSettings
from everstep.recovery.decide import decide_recovery
from fake_planner import one_f_one_b

pytestmark = pytest.mark.timeout(30)


class Live:
    """A coordinator for two workers, and connections to it."""

    def __init__(self, stack: ExitStack) -> None:
        self.events: list[Event] = []
        log = EventLog()
        log.subscribe(self.events.append)
        world = World(
            Shape(1, 2),
            WorldSettings(profile_steps=1),
            planner=one_f_one_b,
            decide=decide_recovery,
            meeting=MEETING,
        )
        self.coordinator = Coordinator(world, events=log)
        self._stack = stack
        stack.enter_context(start_coordinator(self.coordinator))

    def join(
        self,
        number: int,
        *,
        on_halt: OnHalt | None = None,
        settings: LinkSettings | None = None,
    ) -> Client:
        hello = m.Hello(uid=f"w{number}", number=number, pid=1, host="h", data_address="h:1")
        client = connect(self.coordinator.address, hello=hello, on_halt=on_halt, settings=settings)
        self._stack.callback(client.close)
        return client

    def join_both(self, *, clip_norm: float | None = None) -> tuple[Client, Client]:
        clients = self.join(0), self.join(1)
        for client in clients:
            client.wait_welcome(timeout_s=10)
            client.send(m.Ready(job_facts(clip_norm=clip_norm)))
        for client in clients:
            assert client.wait_resume(after_generation=0, timeout_s=10).generation == 1
        return clients

    def wait_event(self, name: str) -> None:
        deadline_s = time.monotonic() + 10
        while not any(event["event"] == name for event in self.events):
            assert time.monotonic() < deadline_s, f"no {name} event in 10 s"
            time.sleep(0.01)


@pytest.fixture
def live() -> Iterator[Live]:
    with ExitStack() as stack:
        yield Live(stack)


def done(step: int, *, generation: int = 1, norm: float = 0.0) -> m.StepDone:
    return m.StepDone(generation=generation, step=step, seconds=0, norm_squared=norm**2)


def test_a_watermark_frees_whoever_waits_for_it(live: Live) -> None:
    first, second = live.join_both()
    first.wait_watermark(-1, timeout_s=0.0)
    first.send(done(0))
    with pytest.raises(WaitTimedOut, match=r"no Watermark\(0\) from the coordinator at .* 0.1 s"):
        first.wait_watermark(0, timeout_s=0.1)
    second.send(done(0))
    first.wait_watermark(0, timeout_s=10)


def test_a_halt_is_heard_at_once_and_ends_every_wait(live: Live) -> None:
    heard: list[tuple[m.Halt, str]] = []
    clients = live.join_both(clip_norm=1.0)
    for client in clients:
        client.on_halt = lambda halt: heard.append((halt, threading.current_thread().name))
        client.send(done(0, norm=3.0))
    for client in clients:
        with pytest.raises(GenerationEnded, match="generation 1 has ended: step 0 is taken again"):
            client.wait_watermark(0, timeout_s=10)
        with pytest.raises(GenerationEnded):
            client.raise_if_halted()
        client.send(m.Halted(1, 0))
    for client in clients:
        resume = client.wait_resume(after_generation=1, timeout_s=10)
        assert resume.redo is not None
        assert resume.redo.step == 0
        client.raise_if_halted()
        client.wait_watermark(0, timeout_s=0.0)
    assert [halt.generation for halt, _ in heard] == [1, 1]
    assert {name for _, name in heard} == {"everstep-link"}


def test_a_new_plan_is_taken_once_at_its_step(live: Live) -> None:
    clients = live.join_both()
    profile = StageProfile(
        forward=1, input_gradient=1, weight_gradient=1, transfer=0, reduction=0, optimizer=0
    )
    for client in clients:
        client.send(done(0))
        client.wait_watermark(-1, timeout_s=10)
    for client in clients:
        client.wait_watermark(0, timeout_s=10)
        client.send(m.Profile(1, profile))
        client.send(done(1))
    for client in clients:
        client.wait_watermark(1, timeout_s=10)
        # Both profiles came before the last StepDone(1), so Watermark(0) was the last one sent.
        assert client.take_replan(2) is None
        replan = client.take_replan(3)
        assert replan is not None
        assert replan.from_step == 3
        assert client.take_replan(4) is None


def test_a_stop_ends_every_wait_with_its_reason(live: Live) -> None:
    first, second = live.join_both()
    first.send(m.Failed("Traceback", "train.py:1"))
    with pytest.raises(CoordinatorStopped, match=r"worker 0:0 .* raised at train.py:1") as caught:
        second.wait_watermark(0, timeout_s=10)
    assert caught.value.exit_code == 1


def cut(client: Client) -> None:
    """The worker's end of the connection, as when the coordinator's machine dies."""
    connection = client._link._connection
    assert connection is not None
    connection.socket.shutdown(2)


def test_a_coordinator_that_vanishes_ends_every_wait_when_nobody_waits_for_its_return() -> None:
    with ExitStack() as stack:
        client = Live(stack).join(0, settings=LinkSettings(return_within_s=0))
        client.wait_welcome(timeout_s=10)
        cut(client)
        with pytest.raises(CoordinatorLost, match="it went away"):
            client.wait_resume(after_generation=0, timeout_s=10)


def test_whoever_comes_back_to_a_coordinator_that_went_on_without_it_is_told_to_stop(
    live: Live,
) -> None:
    first, _ = live.join_both()
    cut(first)
    with pytest.raises(CoordinatorStopped):
        first.wait_watermark(0, timeout_s=10)


def test_a_worker_whose_connection_closes_is_lost_at_once(live: Live) -> None:
    first, second = live.join_both()
    cut(first)
    live.wait_event("worker_lost")
    with pytest.raises(GenerationEnded, match=r"worker 0:0 .* is lost: its connection closed"):
        second.wait_watermark(0, timeout_s=10)
    second.send(m.Halted(1, -1))
    with pytest.raises(CoordinatorStopped, match="stage 0 has no live worker left"):
        second.wait_resume(after_generation=1, timeout_s=10)


def test_garbage_closes_only_the_connection_it_came_on(live: Live) -> None:
    client = live.join(0)
    client.wait_welcome(timeout_s=10)
    with connect_websocket(
        f"ws://{live.coordinator.address}/worker", subprotocols=[Subprotocol(SUBPROTOCOL)]
    ) as stranger:
        stranger.send(b"\x80\x04garbage")
        with pytest.raises(Exception, match="not a message"):
            stranger.recv(timeout=10)
    client.send(m.Heartbeat())
    client.raise_if_halted()
    assert not any(event["event"] == "failed" for event in live.events)


def test_a_second_connection_under_a_live_uid_is_refused(live: Live) -> None:
    live.join(0).wait_welcome(timeout_s=10)
    with pytest.raises(CoordinatorLost, match="connected already"):
        live.join(0).wait_welcome(timeout_s=10)
