"""Workers as the protocol describes them, driving a `World` over ordered, slow connections.

Each `CrewWorker` does what a correct worker may do, and checks what it is told. Nothing moves but
by `act`, `deliver_up` and `deliver_down`, so a test decides every interleaving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.membership import messages as m
from everstep.membership.roster import Shape
from everstep.membership.traffic import Disconnected, Effect, Emit, End, Outcome, Received, Send
from everstep.membership.world import World, WorldSettings
from fake_planner import one_f_one_b

MEETING = m.Meeting(host="127.0.0.1", port=29500)

PROFILE = m.StageProfile(
    forward=0.25, input_gradient=0.25, weight_gradient=0.25, transfer=0, reduction=0, optimizer=0
)


def job_facts(steps: int = 6, *, clip_norm: float | None = None, digest: str = "d") -> m.JobFacts:
    return m.JobFacts(
        microbatches=2,
        steps=steps,
        batch_size=8,
        seed=0,
        digest=digest,
        clip_norm=clip_norm,
        clip_mode=m.ClipMode.POST_VALIDATED,
    )


@dataclass(slots=True)
class CrewWorker:
    number: int
    job: m.JobFacts = field(repr=False)
    norm_of: Callable[[int], float] = field(repr=False)
    """The whole gradient's norm at a step; clipping is 1."""

    up: deque[m.FromWorker] = field(default_factory=deque)
    down: deque[m.ToWorker] = field(default_factory=deque)
    place: m.Welcome | None = None
    generation: int = 0
    finished: int = -1
    watermark: int = -1
    is_halted: bool = True
    has_said_hello: bool = False
    has_finished: bool = False
    has_left: bool = False
    profile_steps_left: int = 0
    replan: m.Replan | None = None
    redone: list[int] = field(default_factory=list)
    stop: m.Stop | None = None

    @property
    def uid(self) -> str:
        return f"w{self.number}"

    @property
    def can_act(self) -> bool:
        if not self.has_said_hello:
            return True
        if self.has_finished:
            return not self.has_left and not self.up
        return not self.is_halted and self.watermark >= self.finished

    def act(self) -> None:
        """The next thing it can do by itself: say Hello, finish a step, finish, leave."""
        assert self.can_act
        if not self.has_said_hello:
            self.has_said_hello = True
            hello = m.Hello(uid=self.uid, number=self.number, pid=1, host="h", data_address="a:1")
            self.up.append(hello)
        elif self.has_finished:
            self.has_left = True
        elif self.finished + 1 == self.job.steps:
            self.has_finished = True
            self.up.append(m.Finished())
        else:
            self._finish_step()

    def _finish_step(self) -> None:
        assert self.place is not None
        self.finished += 1
        is_last = self.place.stage + 1 == self.place.stages
        report = m.StepDone(
            generation=self.generation,
            step=self.finished,
            seconds=0.1,
            loss=100.0 + self.finished if is_last else None,
            norm_squared=self.norm_of(self.finished) ** 2 / self.place.stages,
        )
        self.up.append(report)
        self.profile_steps_left -= 1
        if self.profile_steps_left == 0:
            self.up.append(m.Profile(self.generation, PROFILE))

    def take(self) -> m.ToWorker:
        """Reads one message and answers what must be answered."""
        message = self.down.popleft()
        match message:
            case m.Welcome():
                self.place = message
                self.up.append(m.Ready(self.job))
            case m.Resume():
                self._resume(message)
            case m.Replan():
                assert message.generation == self.generation
                # Step `finished + 1` may be running already.
                assert message.from_step > self.finished + 1
                self.replan = message
            case m.Watermark():
                assert message.generation == self.generation
                assert message.step == self.watermark + 1
                self.watermark = message.step
            case m.Halt():
                assert message.generation == self.generation
                self.is_halted = True
                self.up.append(m.Halted(self.generation, self.finished))
            case m.Stop():
                self.stop = message
        return message

    def _resume(self, resume: m.Resume) -> None:
        assert self.is_halted
        assert resume.generation == self.generation + 1
        assert resume.step == self.finished + 1
        if resume.redo is not None:
            # Whoever must undo a step still has its gradients: it has not run W of the next.
            assert resume.redo.step == self.finished
            assert 0 < resume.redo.scale < 1
            self.redone.append(resume.redo.step)
        self.generation = resume.generation
        self.watermark = resume.step - 1
        self.is_halted = False
        self.profile_steps_left = resume.profile_steps


class Crew:
    """All workers of one world, and everything the world said."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        job: m.JobFacts | None = None,
        norm_of: Callable[[int], float] = lambda _: 0.0,
        settings: WorldSettings | None = None,
    ) -> None:
        self.shape = shape or Shape(2, 2)
        self.world = World(self.shape, settings, planner=one_f_one_b, meeting=MEETING)
        self.job = job or job_facts()
        self.workers = [
            CrewWorker(number, self.job, norm_of) for number in range(self.shape.num_workers)
        ]
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.check: Callable[[Effect], None] = lambda _: None
        """Called for each effect before any worker hears of it."""

    def act(self, worker: CrewWorker) -> None:
        worker.act()
        if worker.has_left:
            self.note(self.world.handle(Disconnected(worker.uid), now_s=self.now_s))

    def deliver_up(self, worker: CrewWorker) -> None:
        self.tell(worker, worker.up.popleft())

    def tell(self, worker: CrewWorker, message: m.FromWorker) -> list[Effect]:
        return self.note(self.world.handle(Received(worker.uid, message), now_s=self.now_s))

    def note(self, effects: list[Effect]) -> list[Effect]:
        by_uid = {worker.uid: worker for worker in self.workers}
        for effect in effects:
            self.effects.append(effect)
            self.check(effect)
            match effect:
                case Send(uid, (m.Welcome() | m.Resume() | m.Replan() | m.Watermark()) as message):
                    by_uid[uid].down.append(message)
                case Send(uid, (m.Halt() | m.Stop()) as message) if uid in by_uid:
                    by_uid[uid].down.append(message)
                case _:
                    pass
        return effects

    def step_once(self) -> bool:
        """Moves everything that can move, once, in the order of the workers."""
        moved = False
        for worker in self.workers:
            if worker.down:
                worker.take()
                moved = True
            if worker.can_act:
                self.act(worker)
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

    def events(self, name: str | None = None) -> list[Emit]:
        emits = [effect for effect in self.effects if isinstance(effect, Emit)]
        return [emit for emit in emits if name in (None, emit.event)]

    def event_values(self, name: str, field_name: str) -> list[object]:
        return [emit.fields[field_name] for emit in self.events(name)]

    @property
    def outcome(self) -> Outcome | None:
        ends = [effect.outcome for effect in self.effects if isinstance(effect, End)]
        assert len(ends) <= 1
        return ends[0] if ends else None
