"""Workers as the protocol describes them, driving a `World` over ordered, slow connections.

A test decides every interleaving: it picks from `choices`, and kills, freezes and adds workers in
between. `step_once` is the even-handed order for tests that do not care.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from crew_worker import PROFILE, CrewWorker, Gone, Move, Phase, Wire
from everstep.membership import messages as m
from everstep.membership.facts import ClipMode, JobFacts, LogFacts, Meeting
from everstep.membership.moving import Normalizer
from everstep.membership.roster import Shape
from everstep.membership.traffic import (
    Disconnected,
    Effect,
    Emit,
    End,
    Outcome,
    Received,
    Send,
    Tick,
)
from everstep.membership.world import World, WorldSettings
from everstep.recovery.decide import decide_recovery
from everstep.recovery.rebuild import plan_replay
from fake_planner import one_f_one_b

__all__ = ["PROFILE", "Crew", "CrewAgent", "CrewWorker", "Move", "Phase", "job_facts"]

MEETING = Meeting(host="127.0.0.1", port=29500)


def job_facts(
    steps: int = 6,
    *,
    clip_norm: float | None = None,
    digest: str = "d",
    is_saved: bool = False,
    log: LogFacts | None = None,
) -> JobFacts:
    return JobFacts(
        microbatches=2,
        steps=steps,
        batch_size=8,
        seed=0,
        digest=digest,
        clip_norm=clip_norm,
        clip_mode=ClipMode.POST_VALIDATED,
        is_saved=is_saved,
        log=log,
    )


@dataclass(slots=True)
class CrewAgent:
    """Starts workers when told to, and tells how they ended."""

    uid: str = "agent"
    up: deque[m.FromAgent] = field(default_factory=deque)
    down: deque[m.ToAgent] = field(default_factory=deque)


class Crew:
    """All workers of one world, and everything the world said."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        job: JobFacts | None = None,
        norm_of: Callable[[int], float] = lambda _: 0.0,
        settings: WorldSettings | None = None,
        has_agent: bool = False,
        normalize: Normalizer | None = None,
    ) -> None:
        self.shape = shape or Shape(2, 2)
        self.world = World(
            self.shape,
            settings,
            planner=one_f_one_b,
            decide=decide_recovery,
            meeting=MEETING,
            normalize=normalize,
            plan_replay=plan_replay,
        )
        self.job = job or job_facts()
        self.workers: list[CrewWorker] = []
        self.agent = CrewAgent() if has_agent else None
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.outcome: Outcome | None = None
        self.check: Callable[[Effect], None] = lambda _: None
        """Called for each effect before any worker hears of it."""

        self._emits: defaultdict[str, list[Emit]] = defaultdict(list)
        self._norm_of = norm_of
        self.wire = Wire()
        if self.agent is None:
            for number in range(self.shape.num_workers):
                self.add(number)
        else:
            hello = m.AgentHello(uid="agent", host="h", workers=self.shape.num_workers)
            self.agent.up.append(hello)

    def add(self, number: int) -> CrewWorker:
        """A new process with that number: `w3`, and `w3+` when it is not the first."""
        num_before = sum(worker.number == number for worker in self.workers)
        uid = f"w{number}" + "+" * num_before
        worker = CrewWorker(uid, number, self.job, self._norm_of, self.wire)
        self.workers.append(worker)
        return worker

    def worker(self, uid: str) -> CrewWorker:
        return next(worker for worker in self.workers if worker.uid == uid)

    # What can happen next.

    def choices(self) -> list[Callable[[], object]]:
        """Everything that can happen next, one step of one side at a time."""
        found: list[Callable[[], object]] = []
        for worker in self.workers:
            if worker.is_awake and worker.down:
                found.append(worker.take)
            found += [partial(worker.act, move) for move in worker.moves()]
            if worker.up:
                found.append(partial(self.deliver_up, worker))
        if self.agent is not None and self.agent.up:
            found.append(self.agent_speaks)
        if self.agent is not None and self.agent.down:
            found.append(self.agent_hears)
        return found

    def deliver_up(self, worker: CrewWorker) -> None:
        message = worker.up.popleft()
        if isinstance(message, Gone):
            self.note(self.world.handle(Disconnected(worker.uid), now_s=self.now_s))
        else:
            self.tell(worker, message)

    def deliver_all(self, worker: CrewWorker) -> None:
        while worker.up:
            self.deliver_up(worker)

    def tell(self, worker: CrewWorker, message: m.FromWorker) -> list[Effect]:
        return self.note(self.world.handle(Received(worker.uid, message), now_s=self.now_s))

    def hear_everything(self, worker: CrewWorker) -> None:
        """It reads what was sent to it, and its answers arrive."""
        while worker.down:
            worker.take()
        self.deliver_all(worker)

    def do(self, worker: CrewWorker, move: Move) -> None:
        """It hears everything, makes one move, and the world hears of it."""
        self.hear_everything(worker)
        worker.act(move)
        self.deliver_all(worker)

    def agent_speaks(self) -> None:
        assert self.agent is not None
        event = Received(self.agent.uid, self.agent.up.popleft())
        self.note(self.world.handle(event, now_s=self.now_s))

    def agent_hears(self) -> None:
        assert self.agent is not None
        message = self.agent.down.popleft()
        if isinstance(message, m.Spawn):
            for seat in message.seats:
                self.add(seat.number)

    def agent_does_everything(self) -> None:
        assert self.agent is not None
        while self.agent.up:
            self.agent_speaks()
        while self.agent.down:
            self.agent_hears()

    def kill(self, worker: CrewWorker, *, num_unsent: int = 0) -> None:
        """The messages it had not yet got out die with it."""
        worker.die(num_unsent=num_unsent)
        if self.agent is not None:
            exited = m.WorkerExited(uid=worker.uid, number=worker.number, pid=1, code=-9)
            self.agent.up.append(exited)

    def lose(self, *uids: str) -> None:
        """They die, and the world notices at once."""
        for uid in uids:
            worker = self.worker(uid)
            self.kill(worker)
            self.deliver_all(worker)

    def lose_agent(self) -> None:
        assert self.agent is not None
        self.note(self.world.handle(Disconnected(self.agent.uid), now_s=self.now_s))
        self.agent = None

    def pass_time(self, seconds: float) -> None:
        """Whoever is awake says so; then the world looks at its clock."""
        self.now_s += seconds
        for worker in self.workers:
            if worker.is_awake and worker.has_joined and not worker.up:
                self.tell(worker, m.Heartbeat())
        self.note(self.world.handle(Tick(), now_s=self.now_s))

    def note(self, effects: list[Effect]) -> list[Effect]:
        by_uid = {worker.uid: worker for worker in self.workers}
        for effect in effects:
            self.effects.append(effect)
            self.check(effect)
            match effect:
                case Emit(event):
                    self._emits[event].append(effect)
                case End(outcome):
                    assert self.outcome is None
                    self.outcome = outcome
                case Send(uid, m.Spawn() as message) if self.agent and uid == self.agent.uid:
                    self.agent.down.append(message)
                case Send(uid, message) if uid in by_uid and not isinstance(message, m.Spawn):
                    by_uid[uid].down.append(message)
                case _:
                    pass
        return effects

    # The even-handed order.

    def step_once(self) -> bool:
        """Moves everything that can move, once, in the order of the workers."""
        moved = False
        for agent in [self.agent] if self.agent else []:
            if agent.up:
                self.agent_speaks()
                moved = True
            if agent.down:
                self.agent_hears()
                moved = True
        for worker in list(self.workers):
            if worker.down and worker.is_awake:
                worker.take()
                moved = True
            if moves := worker.moves():
                worker.act(moves[0])
                moved = True
            if worker.up:
                self.deliver_up(worker)
                moved = True
        return moved

    def run_until(self, is_reached: Callable[[], bool], *, rounds: int = 500) -> None:
        for _ in range(rounds):
            if is_reached():
                return
            assert self.step_once(), f"nobody can move; events: {self.events()}"
        raise AssertionError(f"not reached in {rounds} rounds; events: {self.events()}")

    def run_to_the_end(self, *, rounds: int = 500) -> Outcome:
        """As `run_until`; when nobody can move, time goes by."""
        for _ in range(rounds):
            if self.outcome is not None:
                return self.outcome
            if not self.step_once():
                self.pass_time(1.0)
        raise AssertionError(f"no end in {rounds} rounds; events: {self.events()}")

    def events(self, name: str | None = None) -> list[Emit]:
        if name is not None:
            return self._emits[name]
        return [effect for effect in self.effects if isinstance(effect, Emit)]

    def event_values(self, name: str, field_name: str) -> list[object]:
        return [emit.fields[field_name] for emit in self.events(name)]
