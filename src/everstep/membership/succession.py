"""The door of a new coordinator: finds out whether there was another, and lets the world take over.

Pure, like the world behind it. A job's first word is a Hello. When the first words are Rejoins and
those of agents that run workers already, all are heard before the world is told anything: until
every member of the newest generation is back or known to be gone, or patience ends. What came
meanwhile follows in the order it came. Whoever trained and comes back after that is turned away.

When the events file tells of a job that has not ended, new workers are kept waiting from the start:
were they quicker than those that come back, they would begin the job anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.membership import messages as m
from everstep.membership.exits import describe_exit
from everstep.membership.takeover import Heard, Told, awaited, take_stock
from everstep.membership.traffic import (
    Disconnected,
    Effect,
    Input,
    Received,
    TakenOver,
    Tick,
)
from everstep.membership.world import World


@dataclass(slots=True)
class _Hearing:
    since_s: float
    rejoins: dict[str, m.Rejoin] = field(default_factory=dict)
    agents: dict[str, m.AgentHello] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    later: list[Input] = field(default_factory=list)


class Succession:
    def __init__(self, world: World, *, told: Told | None = None) -> None:
        self._world = world
        self._told = told or Told()
        self._hearing: _Hearing | None = None
        self._is_settled = False

    def handle(self, event: Input, *, now_s: float) -> list[Effect]:
        """As of the world: takes in one event and returns what is to be done, in order."""
        if self._is_settled or self._world.outcome is not None:
            return self._world.handle(event, now_s=now_s)
        if self._hearing is None:
            if not self._told.is_under_way and not _speaks_of_the_past(event):
                effects = self._world.handle(event, now_s=now_s)
                self._is_settled = self._world.generation > 0
                return effects
            self._hearing = _Hearing(now_s)
        self._hear(self._hearing, event)
        return self._take_over_when_heard(self._hearing, now_s)

    def _hear(self, hearing: _Hearing, event: Input) -> None:
        match event:
            case Received(uid, m.Rejoin() as rejoin):
                hearing.rejoins[uid] = rejoin
                hearing.gone.pop(uid, None)
            case Received(uid, m.AgentHello() as hello) if hello.seats:
                hearing.agents[uid] = hello
                hearing.gone |= {gone.uid: describe_exit(gone.code) for gone in hello.ended}
            case Received(uid, m.WorkerExited() as exited) if uid in hearing.agents:
                hearing.agents[uid] = hearing.agents[uid].without(exited)
                hearing.gone[exited.uid] = describe_exit(exited.code)
            case Disconnected(uid) if uid in hearing.rejoins:
                hearing.gone.setdefault(uid, "its connection closed")
            case Tick():
                pass
            case _:
                hearing.later.append(event)

    def _take_over_when_heard(self, hearing: _Hearing, now_s: float) -> list[Effect]:
        waited_s = now_s - hearing.since_s
        heard = Heard(
            rejoins=hearing.rejoins,
            agents=hearing.agents,
            gone=hearing.gone,
            waited_s=waited_s,
        )
        if not self._has_heard_enough(heard, hearing.later):
            return []
        self._is_settled = True
        effects: list[Effect] = []
        if heard.rejoins or heard.agents:
            stock = take_stock(heard, now_s=now_s, told=self._told)
            effects += self._world.handle(TakenOver(stock), now_s=now_s)
        for event in hearing.later:
            effects += self._world.handle(event, now_s=now_s)
        return effects

    def _has_heard_enough(self, heard: Heard, later: list[Input]) -> bool:
        is_patient = heard.waited_s < self._world.settings.patience.lose_after_s
        if any(rejoin.generation > 0 for rejoin in heard.rejoins.values()):
            return not is_patient or not awaited(heard)
        if is_patient and self._told.is_under_way:
            return False
        hellos = [e for e in later if isinstance(e, Received) and isinstance(e.message, m.Hello)]
        num_known = len(heard.rejoins) + len(hellos) + len(self._world.roster.here())
        # Workers that run come back or, when they never got that far, say Hello in the end.
        is_anybody_to_come = any(agent.running for agent in heard.agents.values())
        if num_known or not is_anybody_to_come:
            return not is_patient or num_known >= self._world.shape.num_workers
        return False


def _speaks_of_the_past(event: Input) -> bool:
    match event:
        case Received(_, m.Rejoin()):
            return True
        case Received(_, m.AgentHello() as hello):
            return bool(hello.seats)
        case _:
            return False
