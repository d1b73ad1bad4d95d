"""Who is here: workers by uid and by place, and the agents that run them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from everstep.core.errors import ConfigError
from everstep.core.ids import WorkerId
from everstep.membership.facts import JobFacts, LogRun, Member, RollBack, Seat, StageProfile
from everstep.membership.messages import Hello
from everstep.membership.states import GONE_STATES, Happening, State, after


@dataclass(frozen=True, slots=True)
class Shape:
    """The grid of places."""

    replicas: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("replicas", "stages"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")

    @property
    def num_workers(self) -> int:
        return self.replicas * self.stages

    def place(self, number: int) -> WorkerId | None:
        """The place of worker `number`; None for numbers beyond the grid."""
        if not 0 <= number < self.num_workers:
            return None
        return WorkerId(*divmod(number, self.stages))

    def places(self) -> list[WorkerId]:
        return [WorkerId(r, s) for r in range(self.replicas) for s in range(self.stages)]


@dataclass(slots=True)
class Worker:
    """One process, from its Hello on."""

    hello: Hello
    place: WorkerId | None
    """None: it waits for one."""

    heard_s: float
    state: State = State.JOINING
    job: JobFacts | None = None
    profile: StageProfile | None = None
    finished_step: int | None = -1
    """None for a new worker that has no state yet."""

    is_copying: bool = False
    """Its state is about to be replaced by a peer's: `finished_step` is that of the old one."""

    operations: int = 0
    owed_redo: RollBack | None = None
    """Decided by the last coordinator, done by others and not yet by this one."""

    saved: int | None = None
    """The step of the newest checkpoint that it can read."""

    owed_restore: int | None = None
    """The checkpoint that it is still to be told to load; its step counts as finished."""

    is_operating: bool = False
    """It halted in an evaluation or a gathering."""

    logged: tuple[LogRun, ...] = ()
    """What its log held when it halted."""

    is_of_the_past: bool = False
    """All workers have been started again since."""

    @property
    def uid(self) -> str:
        return self.hello.uid

    @property
    def is_here(self) -> bool:
        return self.state not in GONE_STATES

    def move(self, happening: Happening) -> None:
        self.state = after(self.state, happening)

    def __str__(self) -> str:
        where = "without a place" if self.place is None else str(self.place)
        return f"worker {where} (pid {self.hello.pid} on {self.hello.host})"


@dataclass(slots=True)
class AgentRecord:
    host: str
    seats: tuple[Seat, ...]
    is_here: bool = True


@dataclass(slots=True)
class Roster:
    shape: Shape
    workers: dict[str, Worker] = field(default_factory=dict)
    """By uid, in the order they came; the lost stay, so that they are known when they wake up."""

    agents: dict[str, AgentRecord] = field(default_factory=dict)
    reserved: dict[int, WorkerId] = field(default_factory=dict)
    """By number: the places of workers that move, until they are there."""

    def add(self, hello: Hello, *, now_s: float) -> Worker:
        """Takes the place reserved for it or that of its number, or the vacancy where it helps
        most; none when there is no vacancy."""
        place = self.reserved.pop(hello.number, self.shape.place(hello.number))
        if place is None or place in self.placed():
            place = self.best_vacancy()
        worker = Worker(hello, place, now_s)
        self.workers[hello.uid] = worker
        return worker

    def seat_one_that_waits(self) -> Worker | None:
        """Gives the best vacancy to the worker that has waited longest for one."""
        waiting = (worker for worker in self.here() if worker.place is None)
        worker = next(waiting, None)
        if worker is not None:
            worker.place = self.best_vacancy()
        return worker

    def here(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_here]

    def left(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.state is State.LEFT]

    def placed(self) -> dict[WorkerId, Worker]:
        """The live workers by place, in the order of places."""
        by_place = {worker.place: worker for worker in self.here() if worker.place is not None}
        return {place: by_place[place] for place in sorted(by_place)}

    def vacancies(self) -> list[WorkerId]:
        live = self.placed()
        return [place for place in self.shape.places() if place not in live]

    def best_vacancy(self) -> WorkerId | None:
        """Of the stage with the fewest live workers: it sets everybody's pace."""
        vacancies = self.vacancies()
        losses = Counter(place.stage for place in vacancies)
        return min(vacancies, key=lambda place: (-losses[place.stage], place), default=None)

    def agent_of(self, number: int) -> str | None:
        """The uid of the live agent that was told to start worker `number`, or of any other."""
        here = [uid for uid, agent in self.agents.items() if agent.is_here]
        theirs = [u for u in here if any(s.number == number for s in self.agents[u].seats)]
        return next(iter(theirs + here), None)

    def members(self, uids: Collection[str]) -> tuple[Member, ...]:
        """How the workers of a generation find each other."""
        return tuple(
            Member(
                replica=place.replica,
                stage=place.stage,
                uid=worker.uid,
                number=worker.hello.number,
                pid=worker.hello.pid,
                data_address=worker.hello.data_address,
            )
            for place, worker in self.placed().items()
            if worker.uid in uids
        )

    def seats_for(self, *, offered: int) -> tuple[Seat, ...]:
        """The numbers an agent is to start, after those that others were given."""
        first = sum(len(agent.seats) for agent in self.agents.values())
        last = min(first + offered, self.shape.num_workers)
        return tuple(Seat(number, str(self.shape.place(number))) for number in range(first, last))

    def unjoined(self, agent: AgentRecord) -> Iterator[int]:
        """Numbers the agent was told to start whose workers have not said Hello."""
        joined = {w.hello.number for w in self.workers.values() if not w.is_of_the_past}
        return (seat.number for seat in agent.seats if seat.number not in joined)
