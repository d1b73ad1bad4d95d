"""A crew whose coordinator dies: what it had not got out is lost, and a new one takes its place.

Workers keep a `Memory`, as the client does, and greet the new coordinator with it; so does the
agent with what it runs. Between the two they notice nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from crew import MEETING, Crew
from crew_worker import CrewWorker, Gone, Phase, StageState
from everstep.membership import messages as m
from everstep.membership.facts import JobFacts, Member, Seat
from everstep.membership.memory import Memory
from everstep.membership.roster import Shape
from everstep.membership.succession import Succession
from everstep.membership.takeover import Told
from everstep.membership.traffic import Effect, Input, Send
from everstep.membership.world import World, WorldSettings
from everstep.recovery.decide import decide_recovery
from everstep.recovery.rebuild import plan_replay
from fake_planner import one_f_one_b

Generation = tuple[int, tuple[Member, ...]]
"""Two coordinators may give the same number to different ones."""

Message = TypeVar("Message")


class Coordinator:
    """A world behind its door, which a crew takes for a world."""

    def __init__(self, shape: Shape, settings: WorldSettings | None, *, told: Told) -> None:
        self._world = World(
            shape,
            settings,
            planner=one_f_one_b,
            decide=decide_recovery,
            meeting=MEETING,
            plan_replay=plan_replay,
        )
        self._door = Succession(self._world, told=told)

    def handle(self, event: Input, *, now_s: float) -> list[Effect]:
        return self._door.handle(event, now_s=now_s)

    def __getattr__(self, name: str) -> object:
        return getattr(self._world, name)


@dataclass(slots=True)
class Meetings:
    """Who has come to which generation, and by which plan its steps are run."""

    present: dict[Generation, set[str]] = field(default_factory=dict)
    plans: dict[tuple[Generation, int], int | None] = field(default_factory=dict)


class Mouth(deque[m.FromWorker | Gone]):
    """Remembers what goes through it."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def append(self, message: m.FromWorker | Gone) -> None:
        super().append(message)
        if not isinstance(message, Gone):
            self._memory.said(message)


@dataclass(slots=True)
class LivesWorker(CrewWorker):
    meetings: Meetings = field(default_factory=Meetings, repr=False)
    memory: Memory = field(init=False, repr=False)
    num_heard_ahead: int = 0
    """Messages that are remembered already, and not yet taken."""

    is_cut_off: bool = False
    """Frozen when the coordinator died: it greets the new one when it wakes up."""

    def __post_init__(self) -> None:
        CrewWorker.__post_init__(self)
        hello = m.Hello(uid=self.uid, number=self.number, pid=1, host="h", data_address="a:1")
        self.memory = Memory(hello)
        self.up = Mouth(self.memory)

    def take(self) -> m.ToWorker:
        if self.num_heard_ahead:
            self.num_heard_ahead -= 1
        else:
            self.memory.heard(self.down[0])
        # Not `super()`: a dataclass with slots is not the class that its methods were written in.
        return CrewWorker.take(self)

    def lose_coordinator(self, *, num_heard: int) -> None:
        """It still hears what was on the wire, and what it says from now on is for the next one."""
        while len(self.down) > max(num_heard, self.num_heard_ahead):
            self.down.pop()
        while self.up:
            self.up.pop()
        self.is_cut_off = self.has_joined and self.is_alive
        self.greet()

    def greet(self) -> None:
        if not self.is_cut_off or not self.is_awake:
            return
        self.is_cut_off = False
        for message in list(self.down)[self.num_heard_ahead :]:
            self.memory.heard(message)
        self.num_heard_ahead = len(self.down)
        if self.phase is Phase.STOPPED or any(isinstance(x, m.Stop) for x in self.down):
            return  # it knows that the job is over
        self.up.extend(self.memory.greeting())

    @property
    def _generation(self) -> Generation:
        assert self.resume is not None
        return self.generation, self.resume.members

    def _resume(self, resume: m.Resume) -> None:
        # It may have missed the Resume of a generation that could never begin.
        assert resume.generation - self.generation in (1, 2) or self.generation == 0
        self.generation = resume.generation - 1
        CrewWorker._resume(self, resume)
        self.meetings.present.setdefault(self._generation, set()).add(self.uid)

    def _adjust(self, resume: m.Resume) -> None:
        is_plain = not resume.copies and not resume.replays
        if self.state is None and is_plain and resume.step == 0:
            self.state = StageState()
            return
        CrewWorker._adjust(self, resume)

    def _can_connect(self) -> bool:
        """All members of a generation meet before anything else."""
        if not CrewWorker._can_connect(self):
            return False
        assert self.resume is not None
        return {x.uid for x in self.resume.members} <= self.meetings.present[self._generation]

    def _step(self) -> None:
        assert self.finished is not None
        step = self.finished + 1
        is_replanned = self.replan is not None and self.replan.from_step <= step
        plan = self.replan.from_step if self.replan and is_replanned else None
        assert plan == self.meetings.plans.setdefault((self._generation, step), plan)
        CrewWorker._step(self)


class LivesCrew(Crew):
    def __init__(
        self,
        shape: Shape,
        *,
        job: JobFacts,
        norm_of: Callable[[int], float] = lambda _: 0.0,
        settings: WorldSettings | None = None,
        has_agent: bool = False,
    ) -> None:
        self.meetings = Meetings()
        self.settings = settings
        self.seats: list[Seat] = []
        self.spawned: list[CrewWorker] = []
        self.connected: set[str] = set()
        super().__init__(shape, job=job, norm_of=norm_of, settings=settings, has_agent=has_agent)
        self.world = self._new_world()

    def _new_world(self) -> World:
        steps = self.event_values("step", "step")
        last = steps[-1] if steps else None
        assert last is None or isinstance(last, int)
        told = Told(last_step=last, has_finished=bool(self.events("finished")))
        return cast(World, Coordinator(self.shape, self.settings, told=told))

    def add(self, number: int) -> LivesWorker:
        num_before = sum(worker.number == number for worker in self.workers)
        worker = LivesWorker(
            f"w{number}" + "+" * num_before,
            number,
            self.job,
            self._norm_of,
            self.wire,
            meetings=self.meetings,
        )
        self.workers.append(worker)
        return worker

    def tell(self, worker: CrewWorker, message: m.FromWorker) -> list[Effect]:
        if isinstance(message, m.Hello | m.Rejoin):
            self.connected.add(worker.uid)
        return super().tell(worker, message)

    def note(self, effects: list[Effect]) -> list[Effect]:
        """What is said to those who have not greeted this coordinator goes nowhere."""
        reachable = {"agent"} | self.connected
        kept = [e for e in effects if not isinstance(e, Send) or e.uid in reachable]
        return super().note(kept)

    def pass_time(self, seconds: float) -> None:
        """Links come back in less time than matters: only who is frozen is late."""
        for worker in self.workers:
            while worker.is_awake and worker.up and isinstance(worker.up[0], m.Hello | m.Rejoin):
                self.deliver_up(worker)
        super().pass_time(seconds)

    def agent_hears(self) -> None:
        assert self.agent is not None
        message = self.agent.down[0]
        if isinstance(message, m.Spawn):
            self.seats += [seat for seat in message.seats if seat not in self.seats]
        num_before = len(self.workers)
        super().agent_hears()
        self.spawned += self.workers[num_before:]

    def kill_coordinator(self, num_heard: Callable[[], int]) -> None:
        """Each worker hears so many of the messages that were on their way to it."""
        assert self.outcome is None
        self.world = self._new_world()
        self.connected.clear()
        for worker in self.workers:
            assert isinstance(worker, LivesWorker)
            worker.lose_coordinator(num_heard=num_heard())
        if self.agent is not None:
            self.agent.up.clear()
            for _ in range(min(num_heard(), len(self.agent.down))):
                self.agent_hears()
            self.agent.down.clear()
            self.agent.up.append(self._agent_hello())

    def wake(self) -> None:
        for worker in self.workers:
            assert isinstance(worker, LivesWorker)
            worker.is_frozen = False
            worker.greet()

    def _agent_hello(self) -> m.AgentHello:
        return m.AgentHello(
            uid="agent",
            host="h",
            workers=self.shape.num_workers,
            seats=tuple(self.seats),
            running=tuple(worker.number for worker in self.spawned if worker.is_alive),
            ended=tuple(
                m.WorkerExited(uid=worker.uid, number=worker.number, pid=1, code=_exit_code(worker))
                for worker in self.spawned
                if not worker.is_alive
            ),
        )


def _exit_code(worker: CrewWorker) -> int:
    return 0 if worker.has_finished or worker.stop is not None else -9
