"""Workers are lost, replaced and fenced: what the world makes of it, without a socket."""

from __future__ import annotations

import pytest

from crew import Crew, Move, Phase, job_facts
from everstep.membership import messages as m
from everstep.membership.facts import Copy, StepResult
from everstep.membership.roster import Shape
from everstep.membership.silence import Patience
from everstep.membership.traffic import Send
from everstep.membership.world import WorldSettings


def trained(crew: Crew, *, steps: int) -> Crew:
    crew.run_until(lambda: len(crew.events("step")) >= steps)
    return crew


def resumes(crew: Crew, generation: int) -> list[m.Resume]:
    sent = [effect.message for effect in crew.effects if isinstance(effect, Send)]
    return [x for x in sent if isinstance(x, m.Resume) and x.generation == generation]


@pytest.mark.parametrize("after_steps", [0, 1, 3, 4])
def test_a_loss_costs_a_generation_and_no_step(after_steps: int) -> None:
    crew = trained(Crew(), steps=after_steps)
    crew.run_until(lambda: crew.world.generation == 1)
    crew.lose("w3")
    assert crew.run_to_the_end().exit_code == 0
    assert crew.event_values("step", "step") == list(range(6))
    assert crew.event_values("generation", "lost") == [[], ["1:1"]]
    (recovered,) = crew.events("recovered")
    assert recovered.fields["lost"] == ["1:1"]


def test_all_workers_of_a_replica_may_be_lost_at_once() -> None:
    crew = trained(Crew(Shape(3, 2)), steps=2)
    crew.lose("w0", "w1")
    assert crew.run_to_the_end().exit_code == 0
    assert len(crew.events("generation")) == 2
    assert crew.event_values("recovered", "lost") == [["0:0", "0:1"]]


def one_rolls_forward() -> Crew:
    """w0 alone has step 0 when w2 is lost; w1 is to copy it."""
    crew = Crew(Shape(3, 1))
    crew.run_until(lambda: all(w.phase is Phase.RUNNING for w in crew.workers))
    w0, w1, _ = crew.workers
    crew.do(w0, Move.STEP)
    crew.lose("w2")
    for worker in (w0, w1):
        crew.do(worker, Move.HALT)
    return crew


def test_a_second_loss_while_the_others_copy_is_one_more_generation() -> None:
    crew = one_rolls_forward()
    w1 = crew.workers[1]
    assert all(r.copies == (Copy(0, 0, 1),) for r in resumes(crew, 2))
    assert all((r.step, r.watermark) == (1, -1) for r in resumes(crew, 2))
    crew.lose("w0")  # the only one that has step 0; w1 runs it again
    assert crew.run_to_the_end().exit_code == 0
    assert crew.event_values("generation", "resume_step") == [0, 1, 0]
    assert w1.state is not None
    assert [update.generation for update in w1.state.applied] == [3] * 6


def test_the_step_is_closed_when_the_last_copy_has_arrived() -> None:
    crew = one_rolls_forward()
    assert crew.events("step") == []
    assert resumes(crew, 2)[1].result == StepResult(100.0, {})
    crew.run_until(lambda: bool(crew.events("step")))
    assert crew.event_values("step", "loss") == [100.0]


def test_a_replacement_joins_at_a_boundary_and_nobody_is_interrupted() -> None:
    crew = trained(Crew(job=job_facts(20)), steps=2)
    crew.lose("w1")
    crew.run_until(lambda: crew.world.generation == 2)
    num_halts = sum(isinstance(e, Send) and isinstance(e.message, m.Halt) for e in crew.effects)
    newcomer = crew.add(1)
    crew.run_until(lambda: newcomer.phase is Phase.RUNNING)
    assert sum(isinstance(e, Send) and isinstance(e.message, m.Halt) for e in crew.effects) == (
        num_halts
    )
    joined = crew.events("generation")[-1].fields
    assert joined["lost"] == []
    assert joined["rungs"] == {"0": "continue", "1": "replica"}
    assert newcomer.state == crew.worker("w3").state
    assert crew.run_to_the_end().exit_code == 0


def test_a_frozen_worker_that_wakes_is_sent_away_and_changes_nothing() -> None:
    settings = WorldSettings(patience=Patience(tick_gap_s=1e9))
    crew = trained(Crew(settings=settings), steps=2)
    frozen = crew.worker("w2")
    frozen.is_frozen = True
    for _ in range(3):
        crew.pass_time(2.0)
    crew.run_until(lambda: crew.world.generation == 2)
    frozen.is_frozen = False
    (told,) = crew.tell(frozen, m.StepDone(generation=2, step=2, seconds=0))
    assert told == Send("w2", m.Stop("worker 1:0 (pid 1 on h) was declared lost", 1))
    assert crew.run_to_the_end().exit_code == 0
    assert crew.event_values("step", "step") == list(range(6))


def test_a_stage_without_workers_ends_the_job_with_its_number_and_the_last_step() -> None:
    crew = trained(Crew(Shape(1, 3)), steps=2)
    crew.lose("w1")
    outcome = crew.run_to_the_end()
    assert outcome.exit_code == 1
    assert "stage 1 has no live worker left" in outcome.why
    assert "(last finished step: 1)" in outcome.why or "(last finished step: 2)" in outcome.why


def test_a_lost_worker_is_started_again_by_its_agent() -> None:
    crew = Crew(job=job_facts(40), settings=WorldSettings(replace_after_s=0.5), has_agent=True)
    trained(crew, steps=2)
    crew.lose("w3")
    crew.pass_time(0.4)
    assert len(crew.workers) == 4
    crew.pass_time(0.2)
    crew.run_until(lambda: len(crew.workers) == 5 and crew.workers[-1].phase is Phase.RUNNING)
    assert crew.workers[-1].uid == "w3+"
    assert crew.run_to_the_end().exit_code == 0
