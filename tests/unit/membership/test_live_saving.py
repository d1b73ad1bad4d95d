"""Checkpoints as the coordinator sees them, and beginning with one."""

from __future__ import annotations

from crew import Crew, Phase, job_facts
from everstep.membership import messages as m
from everstep.membership.restarting import RESTART_LIMIT
from everstep.membership.roster import Shape
from everstep.membership.world import WorldSettings


def saved_crew(shape: Shape | None = None, *, steps: int = 8, has_agent: bool = True) -> Crew:
    settings = WorldSettings(profile_steps=0, replace_after_s=1.0)
    job = job_facts(steps, is_saved=True)
    return Crew(shape or Shape(2, 2), job=job, settings=settings, has_agent=has_agent)


def run_to_step(crew: Crew, step: int) -> Crew:
    crew.run_until(lambda: len(crew.events("step")) > step)
    return crew


def ask_for_a_checkpoint(crew: Crew) -> int:
    """Its step. Returns when it is on disk."""
    teller = next(w for w in crew.workers if w.phase is Phase.RUNNING)
    num_before = len(crew.events("checkpoint"))
    crew.tell(teller, m.SaveWanted(crew.world.generation))
    crew.run_until(lambda: len(crew.events("checkpoint")) > num_before)
    step = crew.events("checkpoint")[-1].fields["step"]
    assert isinstance(step, int)
    return step


def test_a_checkpoint_is_told_of_once_when_every_stage_has_saved_its_part() -> None:
    crew = run_to_step(saved_crew(), 1)
    step = ask_for_a_checkpoint(crew)
    assert step > 1
    crew.run_to_the_end()
    assert crew.event_values("checkpoint", "step") == [step]
    assert set(crew.workers[0].wire.disk[step, 1]) == {0, 1}


def test_a_save_that_is_wanted_again_before_it_was_taken_is_one_save() -> None:
    crew = run_to_step(saved_crew(), 1)
    for _ in range(3):
        crew.tell(crew.workers[0], m.SaveWanted(1))
    crew.run_to_the_end()
    assert len(crew.events("checkpoint")) == 1


def test_a_save_that_failed_on_two_stages_is_told_of_once() -> None:
    crew = run_to_step(saved_crew(), 1)
    for worker in crew.workers[:2]:
        crew.tell(worker, m.Saved(step=3, why_not="the disk is full"))
    assert crew.event_values("checkpoint_failed", "why") == ["the disk is full"]


def test_a_stage_that_loses_its_last_worker_begins_again_with_the_checkpoint() -> None:
    crew = run_to_step(saved_crew(), 1)
    step = ask_for_a_checkpoint(crew)
    run_to_step(crew, step + 1)
    crew.lose("w1", "w3")
    assert crew.run_to_the_end().exit_code == 0
    assert crew.event_values("restarting", "stage") == [1]
    assert crew.event_values("restored", "step") == [step]
    assert crew.event_values("step", "step") == list(range(8))
    rungs = crew.events("generation")[-1].fields["rungs"]
    assert rungs == {"0": "checkpoint", "1": "checkpoint"}


def test_without_a_checkpoint_on_disk_all_begin_again_at_the_start() -> None:
    crew = run_to_step(saved_crew(), 2)
    crew.lose("w1", "w3")
    assert crew.run_to_the_end().exit_code == 0
    assert crew.events("restored") == []
    assert crew.event_values("step", "step") == list(range(8))


def test_a_job_without_checkpoints_ends_with_the_stage() -> None:
    crew = Crew(Shape(2, 2), job=job_facts(8), has_agent=True)
    run_to_step(crew, 2)
    crew.lose("w1", "w3")
    outcome = crew.run_to_the_end()
    assert outcome.exit_code == 1
    assert "stage 1 has no live worker left" in outcome.why


def test_without_an_agent_nobody_can_be_started_again() -> None:
    crew = run_to_step(saved_crew(has_agent=False), 2)
    crew.lose("w1", "w3")
    assert crew.run_to_the_end().exit_code == 1


def test_a_stage_that_dies_again_and_again_ends_the_job() -> None:
    crew = run_to_step(saved_crew(Shape(1, 2)), 1)
    step = ask_for_a_checkpoint(crew)
    run_to_step(crew, step)
    num_restarts = 0
    while crew.outcome is None:
        generation = crew.world.generation
        crew.lose(crew.workers[-1].uid)
        while crew.outcome is None and crew.world.generation == generation:
            assert crew.step_once()
        num_restarts = len(crew.events("restarting"))
    assert crew.outcome.exit_code == 1
    assert num_restarts == RESTART_LIMIT


def test_who_looked_too_soon_loads_what_the_others_found() -> None:
    """Found in a whole run of the tests: all were started again while the last part of a checkpoint
    was being written; one worker looked before it was there, the others after, and the job ended
    with the advice to use a directory that all can see."""
    crew = saved_crew(has_agent=False)
    for number, worker in enumerate(crew.workers):
        crew.do(worker, worker.moves()[0])
        worker.take()
        worker.up.clear()
        crew.tell(worker, m.Ready(crew.job, 5 if number else None))
    assert crew.outcome is None
    resumes = [message for worker in crew.workers for message in worker.down]
    assert [r.restore for r in resumes if isinstance(r, m.Resume)] == [5] * len(crew.workers)


def test_all_begin_with_the_newest_that_everybody_can_read() -> None:
    crew = saved_crew(has_agent=False)
    for number, worker in enumerate(crew.workers):
        crew.do(worker, worker.moves()[0])
        worker.take()
        worker.up.clear()
        crew.tell(worker, m.Ready(crew.job, 3 if number == 2 else 5))
    assert crew.event_values("restored", "step") == [3]
    assert crew.event_values("generation", "resume_step") == [4]
