"""Random interleavings of a world and correct workers over connections that only keep order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crew import Crew, CrewWorker, job_facts
from everstep.membership import messages as m
from everstep.membership.roster import Shape
from everstep.membership.traffic import Effect, Send, Tick
from everstep.membership.world import WorldSettings

SHAPES = [Shape(1, 1), Shape(2, 1), Shape(1, 3), Shape(2, 2)]


class WorldMachine(RuleBasedStateMachine):
    crew: Crew

    @initialize(
        shape=st.sampled_from(SHAPES),
        steps=st.integers(1, 7),
        clipped=st.sets(st.integers(0, 6)),
        profile_steps=st.integers(0, 3),
    )
    def begin(self, shape: Shape, steps: int, clipped: set[int], profile_steps: int) -> None:
        self.clipped = {step for step in clipped if step < steps}
        self.crew = Crew(
            shape,
            job=job_facts(steps, clip_norm=1.0),
            norm_of=lambda step: 2.0 if step in clipped else 0.5,
            settings=WorldSettings(profile_steps=profile_steps),
        )
        self.crew.check = self._check
        self.watermarks: dict[str, list[int]] = {w.uid: [] for w in self.crew.workers}

    def _some(self, data: st.DataObject, able: list[CrewWorker]) -> CrewWorker:
        return data.draw(st.sampled_from(able), label="worker")

    @precondition(lambda self: any(w.can_act for w in self.crew.workers))
    @rule(data=st.data())
    def a_worker_acts(self, data: st.DataObject) -> None:
        worker = self._some(data, [w for w in self.crew.workers if w.can_act])
        self.crew.act(worker)
        # It just ran W of this step: everybody must have finished the one before.
        if not worker.has_finished:
            assert all(w.finished >= worker.finished - 1 for w in self.crew.workers)

    @precondition(lambda self: any(w.up for w in self.crew.workers))
    @rule(data=st.data())
    def the_world_hears(self, data: st.DataObject) -> None:
        self.crew.deliver_up(self._some(data, [w for w in self.crew.workers if w.up]))

    @precondition(lambda self: any(w.down for w in self.crew.workers))
    @rule(data=st.data())
    def a_worker_hears(self, data: st.DataObject) -> None:
        self._some(data, [w for w in self.crew.workers if w.down]).take()

    @rule(seconds=st.floats(0, 0.5))
    def time_goes_by(self, seconds: float) -> None:
        self.crew.now_s += seconds
        for worker in self.crew.workers:
            if worker.has_said_hello and not worker.has_left and not worker.up:
                self.crew.tell(worker, m.Heartbeat())
        self.crew.note(self.crew.world.handle(Tick(), now_s=self.crew.now_s))

    def _check(self, effect: Effect) -> None:
        match effect:
            case Send(uid, m.Watermark(_, step)):
                assert all(w.finished >= step for w in self.crew.workers)
                assert step not in self.clipped
                assert step not in self.watermarks[uid]
                self.watermarks[uid].append(step)
            case Send(_, m.Resume()):
                # No two generations overlap: nobody is left in the one before.
                assert all(w.is_halted for w in self.crew.workers)
            case _:
                pass

    @invariant()
    def steps_are_told_once_and_nobody_runs_ahead(self) -> None:
        told = self.crew.event_values("step", "step")
        assert told == list(range(len(told)))
        assert self.crew.events("failed") == []
        finished = [w.finished for w in self.crew.workers]
        assert max(finished) - min(finished) <= 1

    def teardown(self) -> None:
        """Whatever was said so far, the job can be brought to its end."""
        if not hasattr(self, "crew"):
            return
        crew = self.crew
        crew.run_until(lambda: crew.outcome is not None)
        self.steps_are_told_once_and_nobody_runs_ahead()
        assert crew.outcome is not None
        assert crew.outcome.exit_code == 0
        assert crew.event_values("step", "step") == list(range(crew.job.steps))
        assert len(crew.events("finished")) == 1
        for worker in crew.workers:
            assert worker.redone == sorted(self.clipped)
        numbers = crew.event_values("generation", "number")
        assert numbers == list(range(1, 2 + len(self.clipped)))


TestWorldMachine = WorldMachine.TestCase
TestWorldMachine.settings = settings(max_examples=50, stateful_step_count=80, deadline=None)
