"""Random interleavings in which the coordinator dies too, between any two of its messages.

Whatever happened, each step is told once, nobody does a step twice or by another plan than its
peers, and the job can be brought to its end.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import Phase as Phases
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from crew import job_facts
from crew_worker import CrewWorker
from crew_worker import Phase as WorkerPhase
from everstep.membership import messages as m
from everstep.membership.facts import LogFacts
from everstep.membership.roster import Shape
from everstep.membership.silence import Patience
from everstep.membership.traffic import Effect, Emit, Send
from everstep.membership.world import WorldSettings
from lives import LivesCrew

SHAPES = [Shape(2, 1), Shape(1, 3), Shape(2, 2), Shape(3, 2)]
PATIENCE = Patience(tick_gap_s=1e9)


class LivesMachine(RuleBasedStateMachine):
    crew: LivesCrew

    @initialize(
        shape=st.sampled_from(SHAPES),
        steps=st.integers(1, 6),
        clipped=st.sets(st.integers(0, 5), max_size=3),
        profile_steps=st.integers(0, 3),
        has_agent=st.booleans(),
        is_logged=st.booleans(),
        num_losses=st.integers(0, 3),
    )
    def begin(
        self,
        shape: Shape,
        steps: int,
        clipped: set[int],
        profile_steps: int,
        has_agent: bool,
        is_logged: bool,
        num_losses: int,
    ) -> None:
        self.clipped = {step for step in clipped if step < steps}
        log = LogFacts(budget_bytes=1) if is_logged else None
        self.crew = LivesCrew(
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
        self.num_newcomers_left = 2
        self.num_broken_left = 3
        self.num_lives_left = 5
        self.is_another_job = False

    @rule(picks=st.binary(min_size=1, max_size=60))
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

    @precondition(lambda self: self.num_lives_left and self.crew.outcome is None)
    @rule(data=st.data())
    def the_coordinator_dies(self, data: st.DataObject) -> None:
        self.num_lives_left -= 1
        few = st.integers(0, 4)
        self.crew.kill_coordinator(lambda: data.draw(few, label="messages still heard"))
        self._check_everything()

    def _mortals(self) -> list[CrewWorker]:
        """Without an agent, nobody tells a new coordinator of a worker that died before the first
        generation: it waits for it, as any coordinator waits for its first workers."""
        if self.crew.agent is None and not self._has_begun():
            return []
        return [w for w in self.crew.workers if w.is_alive and w.has_joined]

    def _has_begun(self) -> bool:
        num_places = self.crew.shape.num_workers
        first = self.crew.workers[:num_places]
        return len(first) == num_places and all(worker.generation > 0 for worker in first)

    def _some(self, data: st.DataObject, able: list[CrewWorker]) -> CrewWorker:
        uids = [worker.uid for worker in able]
        return self.crew.worker(data.draw(st.sampled_from(uids), label="worker"))

    @precondition(lambda self: self.num_losses_left and self._mortals())
    @rule(data=st.data(), num_unsent=st.integers(0, 3))
    def a_worker_dies(self, data: st.DataObject, num_unsent: int) -> None:
        self.num_losses_left -= 1
        self.crew.kill(self._some(data, self._mortals()), num_unsent=num_unsent)

    @precondition(lambda self: self.num_losses_left and self._mortals())
    @rule(data=st.data())
    def a_worker_freezes(self, data: st.DataObject) -> None:
        self.num_losses_left -= 1
        self._some(data, self._mortals()).is_frozen = True

    @precondition(lambda self: any(w.is_frozen for w in self.crew.workers))
    @rule()
    def whoever_is_frozen_wakes(self) -> None:
        self.crew.wake()

    @precondition(lambda self: self.num_broken_left and self._connected())
    @rule(data=st.data())
    def a_channel_breaks(self, data: st.DataObject) -> None:
        self.num_broken_left -= 1
        self._some(data, self._connected()).report_broken()

    def _connected(self) -> list[CrewWorker]:
        phases = (WorkerPhase.CONNECTING, WorkerPhase.RUNNING)
        return [w for w in self.crew.workers if w.is_awake and w.phase in phases]

    @precondition(lambda self: self.num_newcomers_left and self._has_begun())
    @rule(data=st.data())
    def a_newcomer_starts(self, data: st.DataObject) -> None:
        self.num_newcomers_left -= 1
        self.crew.add(data.draw(st.integers(0, self.crew.shape.num_workers), label="number"))

    # What must hold.

    def _check(self, effect: Effect) -> None:
        match effect:
            case Send(_, m.Watermark(_, step)):
                assert step not in self.clipped
            case Emit("generation", {"number": 1}) if self.crew.events("step"):
                # New workers begin the job anew, which they may when nobody of the old is left.
                self.is_another_job = True
                assert not any(w.is_awake and w.state and not w.stop for w in self.crew.workers)
            case Emit("failed", fields):
                assert self._is_hopeless(), fields["why"]
            case _:
                pass

    def _is_here(self, worker: CrewWorker) -> bool:
        known = self.crew.world.roster.workers.get(worker.uid)
        return known is not None and known.is_here

    def _is_hopeless(self) -> bool:
        """Whether some stage has nobody left that holds its state, as far as the world knows."""
        if self.crew.world.generation == 0:
            return not all(self._is_here(worker) for worker in self.crew.workers)
        stages = {
            w.place.stage
            for w in self.crew.workers
            if self._is_here(w) and w.place is not None and w.state is not None
        }
        return len(stages) < self.crew.shape.stages

    def _check_everything(self) -> None:
        if self.is_another_job:
            return
        told = self.crew.event_values("step", "step")
        assert told == list(range(len(told)))
        assert self.crew.event_values("step", "loss") == [100.0 + i for i in range(len(told))]
        groups = defaultdict(list)
        for worker in self.crew.workers:
            if worker.state is None or worker.place is None or not self._is_here(worker):
                continue
            steps = [update.step for update in worker.state.applied]
            assert steps == list(range(len(steps)))
            groups[worker.place.stage, worker.generation, worker.finished].append(worker)
        for workers in groups.values():
            assert all(w.state == workers[0].state for w in workers), workers

    def teardown(self) -> None:
        """Whatever happened, the job can be brought to its end."""
        if not hasattr(self, "crew"):
            return
        crew = self.crew
        crew.wake()
        for _ in range(1000):
            if crew.outcome is not None:
                break
            if not crew.step_once():
                crew.pass_time(1.0)
            self._check_everything()
        if crew.outcome is None:
            # Nobody is left who could tell that there was a job: it waits for workers to begin.
            assert crew.agent is None, crew.events()
            assert not any(w.is_alive and w.state is not None for w in crew.workers), crew.events()
        elif crew.outcome.exit_code == 0 and not self.is_another_job:
            assert crew.event_values("step", "step") == list(range(crew.job.steps))
            assert len(crew.events("finished")) == 1
            for worker in crew.workers:
                if worker.has_finished:
                    assert worker.redone == sorted(self.clipped)


TestLivesMachine = LivesMachine.TestCase
TestLivesMachine.settings = settings(
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phases.explicit, Phases.reuse, Phases.generate, Phases.shrink],
)
