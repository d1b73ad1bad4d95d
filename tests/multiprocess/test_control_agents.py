"""A coordinator and agents at different addresses, and who is let in."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_websocket
from websockets.typing import Origin, Subprotocol

from control_job import write_script
from crew import MEETING
from everstep.core.errors import ConfigError, CoordinatorLost, CoordinatorRefused
from everstep.core.events import Event, EventLog
from everstep.launch.agent import Agent, AgentSettings
from everstep.launch.warm import Script
from everstep.membership.access import Bind
from everstep.membership.codec import SUBPROTOCOL, to_agent
from everstep.membership.coordinator import Coordinator, start_coordinator
from everstep.membership.link import LinkSettings, open_link
from everstep.membership.roster import Shape
from everstep.membership.traffic import Outcome
from everstep.membership.world import World
from everstep.recovery.decide import decide_recovery
from fake_planner import one_f_one_b

pytestmark = pytest.mark.timeout(60)

TOKEN = "correct-horse"


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def coordinator(events: list[Event]) -> Iterator[Coordinator]:
    log = EventLog()
    log.subscribe(events.append)
    world = World(Shape(2, 2), planner=one_f_one_b, decide=decide_recovery, meeting=MEETING)
    bind = Bind(host="127.0.0.2", token=TOKEN)
    with start_coordinator(Coordinator(world, events=log, bind=bind)) as running:
        yield running


def test_agents_at_other_addresses_train_one_job(
    tmp_path: Path, coordinator: Coordinator, events: list[Event]
) -> None:
    script = Script(write_script(tmp_path), ("5",))
    lines: list[str] = []
    outcomes: list[Outcome] = []

    def run_agent(host: str) -> None:
        settings = AgentSettings(
            address=coordinator.address,
            workers=2,
            token=TOKEN,
            host=host,
            preload=("everstep.membership.client",),
        )
        outcomes.append(Agent(script, settings, sink=lines.append).run())

    threads = [threading.Thread(target=run_agent, args=(f"127.0.0.{i}",)) for i in (3, 4)]
    for thread in threads:
        thread.start()
    assert coordinator.wait_ended(timeout_s=40).exit_code == 0
    for thread in threads:
        thread.join(10)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert [e["step"] for e in events if e["event"] == "step"] == [0, 1, 2, 3, 4]
    hosts = {e["host"] for e in events if e["event"] == "worker_joined"}
    assert hosts == {"127.0.0.3", "127.0.0.4"}
    assert len(set(lines)) == 4  # one from each place


@pytest.mark.parametrize(
    ("token", "why"), [("wrong", "not this coordinator's"), ("", "none was given")]
)
def test_a_wrong_or_missing_token_is_refused_with_the_reason(
    coordinator: Coordinator, token: str, why: str
) -> None:
    with pytest.raises(CoordinatorRefused, match=why) as caught:
        open_link(coordinator.address, "/agent", to_agent, token=token)
    assert caught.value.status == 401


def test_an_agent_with_a_wrong_token_leaves_nothing_behind(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    settings = AgentSettings(address=coordinator.address, workers=1, token="wrong", preload=())
    agent = Agent(Script(write_script(tmp_path)), settings)
    with pytest.raises(CoordinatorRefused):
        agent.run()
    assert [t.name for t in threading.enumerate() if t.name == "everstep-warm"] == []


def test_another_version_is_refused_before_the_first_message(coordinator: Coordinator) -> None:
    with pytest.raises(InvalidStatus) as caught:
        connect_websocket(
            f"ws://{coordinator.address}/worker",
            subprotocols=[Subprotocol("everstep.v0")],
            additional_headers={"Authorization": f"Bearer {TOKEN}"},
        )
    assert b"was offered everstep.v0" in caught.value.response.body


def test_a_web_page_is_refused(coordinator: Coordinator) -> None:
    with pytest.raises(InvalidStatus) as caught:
        connect_websocket(
            f"ws://{coordinator.address}/worker?token={TOKEN}",
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            origin=Origin("http://evil.example"),
        )
    assert caught.value.response.status_code == 403


def test_status_needs_the_token_and_health_does_not(coordinator: Coordinator) -> None:
    assert _get(coordinator, "/healthz") == (200, b"ok")
    assert _get(coordinator, "/status")[0] == 401
    code, body = _get(coordinator, "/status", {"Authorization": f"Bearer {TOKEN}"})
    assert code == 200
    status = json.loads(body)
    assert status["address"] == coordinator.address
    assert status["events"][0]["event"] == "started"
    assert status["workers"] == []


def _get(
    coordinator: Coordinator, path: str, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(coordinator.address, timeout=10)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_beyond_loopback_a_token_is_a_must() -> None:
    with pytest.raises(ConfigError, match="a token must be given"):
        Bind(host="0.0.0.0")
    Bind(host="0.0.0.0", token="x")
    Bind(host="::1")


def test_an_address_where_nobody_listens_is_given_up_after_a_while() -> None:
    settings = LinkSettings(connect_within_s=0.2)
    with pytest.raises(CoordinatorLost, match="nobody listens there"):
        open_link("127.0.0.9:9", "/agent", to_agent, settings=settings)
