"""The coordinator's decisions, without a socket."""

from __future__ import annotations

import msgspec
import pytest

from crew import PROFILE, Crew, CrewWorker, Move, job_facts
from everstep.membership import messages as m
from everstep.membership.facts import JobFacts, Seat
from everstep.membership.roster import Shape
from everstep.membership.silence import Patience
from everstep.membership.states import State
from everstep.membership.status import describe
from everstep.membership.traffic import Disconnected, Effect, Received, Send, StopAsked, Tick
from everstep.membership.world import WorldSettings


def sent(effects: list[Effect], kind: type[m.Message]) -> list[str]:
    return [e.uid for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def training(crew: Crew, *, after_steps: int = 0) -> Crew:
    crew.run_until(lambda: len(crew.events("step")) >= after_steps and crew.world.generation > 0)
    return crew


def finish_step(worker: CrewWorker) -> None:
    if Move.STEP in worker.moves():
        worker.act(Move.STEP)


def state_of(crew: Crew, uid: str) -> State:
    return crew.world.roster.workers[uid].state


def test_places_follow_worker_numbers() -> None:
    crew = training(Crew(Shape(2, 3)))
    places = [(w.place.replica, w.place.stage) for w in crew.workers if w.place]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_a_generation_is_formed_only_when_every_place_is_ready() -> None:
    crew = Crew()
    for worker in crew.workers[:-1]:
        worker.act(Move.HELLO)
        crew.deliver_up(worker)
        worker.take()
        crew.deliver_up(worker)
    assert crew.events("generation") == []
    training(crew)
    (formed,) = crew.events("generation")
    assert formed.fields["number"] == 1
    assert formed.fields["resume_step"] == 0
    assert formed.fields["lost"] == []
    assert formed.fields["unit"] == "slots"
    assert formed.fields["actions"] == {
        "0:0": "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1",
        "0:1": "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1",
        "1:0": "F1.0 F1.1 B1.0 W1.0 B1.1 W1.1",
        "1:1": "F1.0 B1.0 W1.0 F1.1 B1.1 W1.1",
    }


def test_workers_with_differing_jobs_are_refused_with_the_difference() -> None:
    crew = Crew()
    crew.workers[2].job = job_facts(steps=7, digest="another")
    crew.run_until(lambda: crew.outcome is not None)
    assert crew.outcome is not None
    assert "steps is 7 here and 6 elsewhere" in crew.outcome.why
    assert "digest is another here" in crew.outcome.why
    assert len(crew.events("failed")) == 1


def test_a_watermark_needs_the_last_report() -> None:
    crew = training(Crew())
    crew.run_until(lambda: Move.STEP in crew.workers[-1].moves())
    for worker in crew.workers:
        finish_step(worker)
    for worker in crew.workers[:-1]:
        crew.deliver_all(worker)
    assert crew.events("step") == []
    before = len(crew.effects)
    crew.deliver_up(crew.workers[-1])
    assert sent(crew.effects[before:], m.Watermark) == ["w0", "w1", "w2", "w3"]
    (step,) = crew.events("step")
    assert step.fields["step"] == 0
    assert step.fields["loss"] == 100.0
    assert step.fields["generation"] == 1


def test_finishing_a_step_ahead_of_its_watermark_breaks_the_protocol() -> None:
    crew = training(Crew())
    crew.tell(crew.workers[0], m.StepDone(generation=1, step=0, seconds=0))
    crew.tell(crew.workers[0], m.StepDone(generation=1, step=1, seconds=0))
    assert crew.outcome is not None
    assert "worker 0:0 broke the protocol: it finished step 1 while step 0 was open" in (
        crew.outcome.why
    )


def test_profiles_change_the_plan_at_a_step_nobody_can_have_begun() -> None:
    crew = Crew(settings=WorldSettings(profile_steps=2))
    crew.run_until(lambda: bool(crew.events("replanned")))
    (replanned,) = crew.events("replanned")
    assert replanned.fields["unit"] == "seconds"
    assert replanned.fields["period"] == 1.0  # two stages of 0.25, two micro-batches
    # The last Watermark said before it was t = from_step - 3.
    steps = [
        e.message.step
        for e in crew.effects
        if isinstance(e, Send) and isinstance(e.message, m.Watermark)
    ]
    assert replanned.fields["from_step"] == 3 + max(steps)
    crew.run_until(lambda: crew.outcome is not None)
    assert all(w.replan is not None for w in crew.workers)


def test_durations_are_the_median_over_the_workers_of_a_stage() -> None:
    crew = training(Crew(Shape(3, 1)))
    for worker, forward in zip(crew.workers, (9.0, 1.0, 2.0), strict=True):
        crew.tell(worker, m.Profile(1, msgspec.structs.replace(PROFILE, forward=forward)))
    assert crew.world.plans.durations is not None
    assert [d.forward for d in crew.world.plans.durations] == [2.0]


def test_a_step_whose_norm_was_too_large_is_taken_again_in_the_next_generation() -> None:
    job = job_facts(clip_norm=1.0)
    crew = Crew(job=job, norm_of=lambda step: 4.0 if step == 2 else 0.5)
    crew.run_until(lambda: crew.outcome is not None)
    resume = next(
        e.message
        for e in crew.effects
        if isinstance(e, Send) and isinstance(e.message, m.Resume) and e.message.redo
    )
    assert resume.generation == 2
    assert resume.step == 3
    assert resume.redo is not None
    assert resume.redo.step == 2
    assert resume.redo.scale == pytest.approx(0.25, rel=1e-5)
    assert crew.event_values("rollback", "step") == [2]
    assert crew.event_values("step", "step") == [0, 1, 2, 3, 4, 5]


def test_the_last_step_can_be_rolled_back_too() -> None:
    crew = Crew(job=job_facts(3, clip_norm=1.0), norm_of=lambda step: 4.0 if step == 2 else 0.5)
    crew.run_until(lambda: crew.outcome is not None)
    assert all(w.redone == [2] for w in crew.workers)
    assert len(crew.events("finished")) == 1


def test_synchronous_clipping_is_none_of_the_coordinators_business() -> None:
    job = JobFacts(microbatches=2, steps=3, batch_size=8, seed=0, digest="d", clip_norm=1.0)
    crew = Crew(job=job, norm_of=lambda _: 9.0)
    crew.run_until(lambda: crew.outcome is not None)
    assert crew.events("rollback") == []


def test_an_overflowed_norm_ends_the_job_with_advice() -> None:
    crew = Crew(job=job_facts(clip_norm=1.0), norm_of=lambda _: float("nan"))
    crew.run_until(lambda: crew.outcome is not None)
    assert crew.outcome is not None
    assert "the gradient norm of step 0 is nan" in crew.outcome.why


def test_a_users_exception_stops_everybody_and_is_told_once() -> None:
    crew = training(Crew(), after_steps=1)
    effects = crew.tell(crew.workers[1], m.Failed("Traceback ...\nValueError: x", "train.py:9"))
    assert sent(effects, m.Stop) == ["w0", "w1", "w2", "w3"]
    crew.tell(crew.workers[2], m.Failed("Traceback ...\nOther: y", "train.py:9"))
    (failed,) = crew.events("failed")
    assert failed.fields["traceback"] == "Traceback ...\nValueError: x"
    assert crew.outcome is not None
    assert crew.outcome.traceback == "Traceback ...\nValueError: x"


def test_a_lost_worker_is_told_once_however_often_it_is_noticed() -> None:
    crew = training(Crew(), after_steps=2)
    exited = m.WorkerExited(uid="w3", number=3, pid=1, code=-9)
    crew.note(crew.world.handle(Received("agent", exited), now_s=0))
    crew.note(crew.world.handle(Disconnected("w3"), now_s=0))
    (lost,) = crew.events("worker_lost")
    assert lost.fields == {"replica": 1, "stage": 1, "pid": 1, "how": "killed by SIGKILL"}
    assert sent(crew.effects, m.Halt) == ["w0", "w1", "w2"]


def test_a_process_that_ends_before_it_joins_is_an_error_that_names_it() -> None:
    crew = Crew()
    exited = m.WorkerExited(uid="x", number=2, pid=77, code=0)
    crew.note(crew.world.handle(Received("agent", exited), now_s=0))
    assert crew.outcome is not None
    assert "worker number 2 (pid 77) ended before it joined: exit code 0" in crew.outcome.why


def test_leaving_after_finishing_is_no_loss() -> None:
    crew = Crew()
    crew.run_until(lambda: crew.outcome is not None)
    assert crew.events("worker_lost") == []
    assert crew.outcome is not None
    assert crew.outcome.exit_code == 0


def test_a_silent_worker_is_suspected_and_then_lost() -> None:
    patience = Patience(suspect_after_s=2, lose_after_s=5, tick_gap_s=100)
    crew = training(Crew(settings=WorldSettings(patience=patience)))
    talking, silent = crew.workers[0], crew.workers[1]
    for worker in crew.workers:
        if worker is not silent:
            crew.now_s = 3.0
            crew.tell(worker, m.Heartbeat())
    crew.note(crew.world.handle(Tick(), now_s=3.0))
    assert state_of(crew, talking.uid) is State.TRAINING
    assert state_of(crew, silent.uid) is State.SUSPECTED
    crew.note(crew.world.handle(Tick(), now_s=5.1))
    assert crew.event_values("worker_lost", "how") == ["silent for 5.1 s"]


def test_a_suspected_worker_that_speaks_is_trusted_again() -> None:
    patience = Patience(suspect_after_s=2, lose_after_s=5, tick_gap_s=100)
    crew = training(Crew(settings=WorldSettings(patience=patience)))
    crew.note(crew.world.handle(Tick(), now_s=3.0))
    assert state_of(crew, "w1") is State.SUSPECTED
    crew.now_s = 3.1
    crew.tell(crew.workers[1], m.Heartbeat())
    assert state_of(crew, "w1") is State.TRAINING


def test_a_coordinator_that_stood_still_blames_nobody() -> None:
    crew = training(Crew())
    crew.note(crew.world.handle(Tick(), now_s=0.0))
    crew.note(crew.world.handle(Tick(), now_s=60.0))
    assert crew.events("worker_lost") == []


def test_a_worker_that_does_not_halt_is_lost() -> None:
    patience = Patience(lose_after_s=1000, halt_within_s=10, tick_gap_s=1000)
    crew = Crew(
        job=job_facts(clip_norm=1.0),
        norm_of=lambda _: 4.0,
        settings=WorldSettings(patience=patience),
    )
    crew.run_until(lambda: bool(crew.events("rollback")))
    crew.note(crew.world.handle(Tick(), now_s=10.5))
    assert crew.event_values("worker_lost", "how")[0] == "it did not halt within 10.5 s"


def test_a_worker_that_was_declared_lost_is_fenced() -> None:
    crew = training(Crew())
    crew.world.roster.workers["w0"].state = State.LOST
    effects = crew.tell(crew.workers[0], m.StepDone(generation=1, step=0, seconds=0))
    assert sent(effects, m.Stop) == ["w0"]
    assert crew.world.ledger.reports == {}


def test_a_uid_joins_once() -> None:
    crew = training(Crew())
    hello = m.Hello(uid="w0", number=0, pid=2, host="h", data_address="a:1")
    effects = crew.tell(crew.workers[0], hello)
    assert sent(effects, m.Stop) == ["w0"]
    assert len(crew.events("worker_joined")) == 4


def test_agents_are_given_the_numbers_that_are_left() -> None:
    crew = Crew(Shape(2, 2))
    spawns = []
    for uid, offered in (("a", 3), ("b", 3), ("c", 2)):
        hello = m.AgentHello(uid=uid, host="h", workers=offered)
        effects = crew.world.handle(Received(uid, hello), now_s=0)
        spawns += [e.message for e in effects if isinstance(e, Send)]
    assert spawns == [
        m.Spawn((Seat(0, "0:0"), Seat(1, "0:1"), Seat(2, "1:0"))),
        m.Spawn((Seat(3, "1:1"),)),
    ]


def test_an_agent_that_leaves_before_its_workers_joined_ends_the_job() -> None:
    crew = Crew(Shape(1, 2))
    hello = m.AgentHello(uid="a", host="node7", workers=2)
    crew.note(crew.world.handle(Received("a", hello), now_s=0))
    crew.note(crew.world.handle(Disconnected("a"), now_s=0))
    assert crew.outcome is not None
    assert "the agent on node7 left before workers [0, 1] joined" in crew.outcome.why


def test_a_stop_from_outside_ends_everything_with_its_code() -> None:
    crew = training(Crew())
    effects = crew.note(crew.world.handle(StopAsked(why="SIGINT", exit_code=130), now_s=0))
    assert sent(effects, m.Stop) == ["w0", "w1", "w2", "w3"]
    assert crew.outcome is not None
    assert crew.outcome.exit_code == 130
    assert crew.events("failed") == []


def test_status_lists_every_worker() -> None:
    crew = training(Crew(), after_steps=2)
    status = describe(crew.world, address="h:1", events=[])
    workers = status["workers"]
    assert isinstance(workers, list)
    assert workers[3] == {
        "replica": 1,
        "stage": 1,
        "pid": 1,
        "host": "h",
        "state": "training",
        "step": 1,
    }
    assert status["finished_step"] == 1
    assert status["plan"] == {"period": 2.0, "bound": 1.0, "unit": "slots"}
