"""Random interleavings of a world and correct workers that die, freeze, wake up and are replaced.

Connections only keep order. After everything that happens, the invariants of the design hold; and
whatever happened, the job can be brought to its end.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import Phase as Phases
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from crew import Crew, CrewWorker, Phase, job_facts
from everstep.membership import messages as m
from everstep.membership.facts import LogFacts
from everstep.membership.generations import FRUITLESS_LIMIT
from everstep.membership.roster import Shape
from everstep.membership.silence import Patience
from everstep.membership.status import describe
from everstep.membership.traffic import Effect, Emit, Received, Send
from everstep.membership.world import WorldSettings

SHAPES = [Shape(1, 1), Shape(2, 1), Shape(1, 3), Shape(2, 2), Shape(3, 2), Shape(3, 1)]
PATIENCE = Patience(tick_gap_s=1e9)
ENOUGH_SILENCE_S = PATIENCE.lose_after_s + 0.5


class WorldMachine(RuleBasedStateMachine):
    crew: Crew

    @initialize(
        shape=st.sampled_from(SHAPES),
        steps=st.integers(1, 6),
        clipped=st.sets(st.integers(0, 5), max_size=3),
        profile_steps=st.integers(0, 3),
        has_agent=st.booleans(),
        num_losses=st.integers(0, 5),
        helpers=st.sampled_from([None, 0, 1]),
        is_logged=st.booleans(),
    )
    def begin(
        self,
        shape: Shape,
        steps: int,
        clipped: set[int],
        profile_steps: int,
        has_agent: bool,
        num_losses: int,
        helpers: int | None,
        is_logged: bool,
    ) -> None:
        self.clipped = {step for step in clipped if step < steps}
        log = LogFacts(budget_bytes=1, helpers=helpers) if is_logged else None
        self.crew = Crew(
            shape,
            job=job_facts(steps, clip_norm=1.0, log=log),
            norm_of=lambda step: 2.0 if step in clipped else 0.5,
            settings=WorldSettings(
                profile_steps=profile_steps,
                patience=PATIENCE,
                replace_after_s=1.0 if has_agent else None,
            ),
            has_agent=has_agent,
        )
        self.crew.check = self._check
        self.num_losses_left = num_losses
        self.num_newcomers_left = 3
        self.num_damaged_left = 2 if is_logged else 0
        self.num_broken_left = FRUITLESS_LIMIT
        self.watermark = -1

    # Ordinary life.

    @rule(picks=st.binary(min_size=1, max_size=40))
    def things_happen(self, picks: bytes) -> None:
        for pick in picks:
            choices = self.crew.choices()
            if not choices:
                return
            choices[pick % len(choices)]()
            self._check_everything()

    @rule(seconds=st.floats(0, 2))
    def time_goes_by(self, seconds: float) -> None:
        self.crew.pass_time(seconds)
        self._check_everything()

    # Trouble.

    def _some(self, data: st.DataObject, able: list[CrewWorker]) -> CrewWorker:
        return data.draw(st.sampled_from(able), label="worker")

    def _mortals(self) -> list[CrewWorker]:
        """Without an agent nobody hears of a worker that dies before it joined."""
        if self.num_losses_left == 0:
            return []
        has_agent = self.crew.agent is not None
        return [w for w in self.crew.workers if w.is_alive and (has_agent or w.has_joined)]

    @precondition(lambda self: self._mortals())
    @rule(data=st.data(), num_unsent=st.integers(0, 3))
    def a_worker_dies(self, data: st.DataObject, num_unsent: int) -> None:
        self.crew.kill(self._some(data, self._mortals()), num_unsent=num_unsent)
        self.num_losses_left -= 1

    @precondition(lambda self: any(w.is_awake for w in self._mortals()))
    @rule(data=st.data())
    def a_worker_freezes(self, data: st.DataObject) -> None:
        self._some(data, [w for w in self._mortals() if w.is_awake]).is_frozen = True
        self.num_losses_left -= 1

    @precondition(lambda self: any(w.is_frozen and w.is_alive for w in self.crew.workers))
    @rule()
    def silence_is_noticed(self) -> None:
        for _ in range(2):
            self.crew.pass_time(ENOUGH_SILENCE_S / 2)
            self._check_everything()

    @precondition(lambda self: any(w.is_frozen and w.is_alive for w in self.crew.workers))
    @rule(data=st.data())
    def a_frozen_worker_wakes(self, data: st.DataObject) -> None:
        frozen = [w for w in self.crew.workers if w.is_frozen and w.is_alive]
        worker = self._some(data, frozen)
        worker.is_frozen = False
        self._check_fence(worker)

    @precondition(lambda self: self.num_broken_left and self._connected())
    @rule(data=st.data())
    def a_channel_breaks(self, data: st.DataObject) -> None:
        self.num_broken_left -= 1
        self._some(data, self._connected()).report_broken()

    def _connected(self) -> list[CrewWorker]:
        phases = (Phase.CONNECTING, Phase.RUNNING)
        return [w for w in self.crew.workers if w.is_awake and w.phase in phases]

    @precondition(lambda self: self.num_newcomers_left)
    @rule(data=st.data())
    def a_newcomer_starts(self, data: st.DataObject) -> None:
        self.num_newcomers_left -= 1
        numbers = st.integers(0, self.crew.shape.num_workers)
        self.crew.add(data.draw(numbers, label="number"))

    @precondition(lambda self: self.num_damaged_left)
    @rule()
    def a_replay_will_fail(self) -> None:
        self.num_damaged_left -= 1
        self.crew.wire.num_damaged += 1

    # What must hold.

    def _check(self, effect: Effect) -> None:
        match effect:
            case Send(_, m.Watermark(_, step)):
                assert all(w.finished is not None and w.finished >= step for w in self._members())
                assert step not in self.clipped
                self.watermark = max(self.watermark, step)
            case Send(_, m.Resume() as resume):
                # No two generations overlap: nobody is left in the one before.
                assert not any(w.generation < resume.generation for w in self._in_generation())
                assert resume.step > self.watermark, "a step that all have is run again"
            case Emit("failed", fields):
                assert self._is_hopeless(), fields["why"]
            case _:
                pass

    def _is_here(self, worker: CrewWorker) -> bool:
        """As far as the world knows."""
        known = self.crew.world.roster.workers.get(worker.uid)
        return known is not None and known.is_here

    def _in_generation(self) -> list[CrewWorker]:
        return [w for w in self.crew.workers if self._is_here(w) and w.is_in_generation]

    def _members(self) -> list[CrewWorker]:
        generation = self.crew.world.generation
        return [w for w in self._in_generation() if w.generation == generation]

    def _is_hopeless(self) -> bool:
        """Whether some stage has nobody left that holds its state."""
        if self.crew.world.generation == 0:
            return not all(self._is_here(w) for w in self.crew.workers)
        stages = {
            w.place.stage
            for w in self.crew.workers
            if self._is_here(w) and w.place is not None and w.state is not None
        }
        return len(stages) < self.crew.shape.stages

    def _check_everything(self) -> None:
        told = self.crew.event_values("step", "step")
        assert told == list(range(len(told)))
        assert self.crew.event_values("step", "loss") == [100.0 + i for i in range(len(told))]
        live = [w for w in self.crew.workers if self._is_here(w) and w.state is not None]
        for worker in live:
            assert worker.state is not None
            steps = [update.step for update in worker.state.applied]
            assert steps == list(range(len(steps)))
        finished = [w.finished for w in live if w.finished is not None]
        assert not finished or max(finished) - min(finished) <= 1
        self._check_equality(live)

    def _check_equality(self, live: list[CrewWorker]) -> None:
        """Workers of a stage at the same step of the same generation hold the same."""
        groups = defaultdict(list)
        for worker in live:
            assert worker.place is not None
            groups[worker.place.stage, worker.generation, worker.finished].append(worker)
        for workers in groups.values():
            assert all(w.state == workers[0].state for w in workers), workers

    def _check_fence(self, worker: CrewWorker) -> None:
        """Whoever was declared lost can say what it likes."""
        world = self.crew.world
        if world.outcome is not None or worker.phase is Phase.NEW or self._is_here(worker):
            return
        if worker.uid not in world.roster.workers:
            return
        before = describe(world, address="", events=())
        for word in (m.Heartbeat(), m.StepDone(generation=world.generation, step=0, seconds=0)):
            effects = self.crew.note(
                world.handle(Received(worker.uid, word), now_s=self.crew.now_s)
            )
            assert [type(e.message) for e in effects if isinstance(e, Send)] == [m.Stop]
            assert len(effects) == 1
        assert describe(world, address="", events=()) == before

    def teardown(self) -> None:
        """Whatever happened, the job can be brought to its end."""
        if not hasattr(self, "crew"):
            return
        crew = self.crew
        for worker in crew.workers:
            worker.is_frozen = False
        for _ in range(1000):
            if crew.outcome is not None:
                break
            if not crew.step_once():
                crew.pass_time(1.0)
            self._check_everything()
        assert crew.outcome is not None, crew.events()
        if crew.outcome.exit_code == 0:
            self._check_success()

    def _check_success(self) -> None:
        crew = self.crew
        assert crew.events("failed") == []
        assert crew.event_values("step", "step") == list(range(crew.job.steps))
        assert crew.event_values("rollback", "step") == sorted(self.clipped)
        assert len(crew.events("finished")) == 1
        for worker in crew.workers:
            if worker.has_finished:
                assert worker.redone == sorted(self.clipped)
        numbers = crew.event_values("generation", "number")
        assert numbers == list(range(1, 1 + len(numbers)))


TestWorldMachine = WorldMachine.TestCase
TestWorldMachine.settings = settings(
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    # Explaining a failure takes minutes here, and says little.
    phases=[Phases.explicit, Phases.reuse, Phases.generate, Phases.shrink],
)
