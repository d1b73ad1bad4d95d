"""Which number among the workers of its machine, and so which device, a worker gets."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from everstep.launch.agent import Agent, AgentSettings
from everstep.launch.warm import Script, WorkerProcess
from everstep.membership.facts import Seat

PROCESS = cast(WorkerProcess, object())


def start(agent: Agent, number: int) -> int:
    seat = Seat(number=number, label=f"0:{number}")
    local_number = agent._local_number(seat)
    agent._running[f"uid-{number}"] = seat, PROCESS
    return local_number


def test_a_replacement_gets_its_predecessors_and_a_stranger_a_free_one() -> None:
    agent = Agent(Script(Path("train.py")), AgentSettings(address="h:1", workers=4))
    assert [start(agent, number) for number in (4, 5, 6, 7)] == [0, 1, 2, 3]
    del agent._running["uid-6"]
    assert start(agent, 6) == 2
    del agent._running["uid-4"]
    del agent._running["uid-7"]
    assert start(agent, 9) == 0, "one that another machine had lost"
    assert start(agent, 4) == 3, "its own is taken"
