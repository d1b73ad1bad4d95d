"""Bugs of the coordinator's decisions that were found and fixed, with their stories."""

from __future__ import annotations

from crew import PROFILE, Crew, Move, Phase, job_facts
from everstep.membership import messages as m
from everstep.membership.generations import FRUITLESS_LIMIT
from everstep.membership.roster import Shape
from everstep.membership.world import WorldSettings


def able_to_step(crew: Crew) -> Crew:
    """Everybody is about to finish step 0."""
    crew.run_until(lambda: all(w.phase is Phase.RUNNING for w in crew.workers))
    return crew


def test_a_replacement_has_not_run_what_the_lost_worker_of_its_place_ran() -> None:
    # Reports were kept by place. w0 alone ran step 0, w1 copied it, w0 died; the copy of w0's
    # replacement overwrote w0's report, the only one with the norm, and the job failed for a
    # norm that "a stage" had not given. Who holds a step and who ran it are two things.
    crew = able_to_step(Crew(Shape(4, 1), job=job_facts(clip_norm=1.0)))
    w0, w1, w2, _ = crew.workers
    crew.do(w0, Move.STEP)
    crew.lose("w3")
    for worker in (w0, w1, w2):
        crew.do(worker, Move.HALT)
    for worker in (w0, w1):
        crew.do(worker, Move.CONNECT)
    crew.lose("w0")
    newcomer = crew.add(0)
    crew.do(newcomer, Move.HELLO)
    crew.hear_everything(newcomer)
    for worker in (w1, w2):
        crew.do(worker, Move.HALT)
    for worker in (w1, newcomer, w2):
        crew.do(worker, Move.CONNECT)
    assert crew.run_to_the_end().exit_code == 0
    assert crew.event_values("step", "loss") == [100.0 + step for step in range(6)]


def test_a_worker_that_is_to_copy_an_older_state_has_not_finished_the_step() -> None:
    # w0 finished step 0, nobody of stage 1 did, and w2 has the state before it: w0 copies that.
    # Its Copied was slow, the others ran step 0 again, and w0's first run was taken for its
    # second: the step was closed without w0.
    crew = able_to_step(Crew(Shape(2, 2)))
    w0, w1, w2, _ = crew.workers
    crew.do(w0, Move.STEP)
    crew.lose("w3")
    for worker in (w0, w1, w2):
        crew.do(worker, Move.HALT)
    for worker in (w2, w1):
        crew.do(worker, Move.CONNECT)
    w0.take()
    w0.act(Move.CONNECT)
    for worker in (w1, w2):
        crew.do(worker, Move.STEP)
    assert crew.events("step") == []
    w0.act(Move.STEP)
    crew.deliver_all(w0)
    assert len(crew.events("step")) == 1


def test_profiles_that_arrive_while_a_stage_has_halted_are_no_measurement() -> None:
    # When stage 1 had halted, the profiles of stage 0 were "all of those in training": the median
    # over stage 1 was one of nothing, and the coordinator died of a StatisticsError.
    crew = able_to_step(Crew())
    w0, w1, w2, w3 = crew.workers
    crew.tell(w0, m.Broken(1, "reset"))
    for worker in (w1, w3):
        crew.tell(worker, m.Halted(1, -1))
    for worker in (w0, w2):
        crew.tell(worker, m.Profile(1, PROFILE))
    assert crew.world.plans.durations is None
    assert crew.outcome is None


def test_nothing_is_replanned_while_workers_halt_at_a_boundary() -> None:
    # Workers that had halted by plan counted as lost for a new plan of the generation that was
    # about to end: with a whole stage halted there is no plan at all.
    crew = Crew(Shape(1, 2), settings=WorldSettings(profile_steps=100))
    crew.run_until(lambda: len(crew.events("step")) == 1)
    newcomer = crew.add(0)
    crew.world.roster.shape = Shape(2, 2)  # room for one more
    w0, w1 = crew.workers[:2]
    crew.run_until(lambda: w0.boundary is not None and w0.finished == w0.boundary)
    w1.is_frozen = True
    crew.run_until(lambda: w0.phase is Phase.WAITING and not w0.up)
    for worker in (w0, w1):
        crew.tell(worker, m.Profile(1, PROFILE))
    assert crew.events("replanned") == []
    assert newcomer.is_alive


def one_finished_and_one_about_to() -> Crew:
    """All steps are done; w0 has said Finished, w1 has not yet heard that it may."""
    crew = able_to_step(Crew(Shape(2, 1), job=job_facts(1)))
    w0, w1 = crew.workers
    for worker in (w1, w0):
        crew.do(worker, Move.STEP)
    crew.do(w0, Move.FINISH)
    return crew


def test_a_finished_worker_that_leaves_while_others_halt_is_not_lost() -> None:
    # w1 died right after the last step. w0 had finished, was told to halt, and left, as its script
    # was over: that was a second loss, nobody was left, and a job with all its steps done failed.
    crew = one_finished_and_one_about_to()
    crew.lose("w1")
    crew.do(crew.workers[0], Move.LEAVE)
    assert crew.event_values("worker_lost", "replica") == [1]
    assert len(crew.events("finished")) == 1
    assert crew.outcome is not None
    assert crew.outcome.exit_code == 0


def test_a_loss_after_the_others_have_left_does_not_undo_their_success() -> None:
    # As before, but w0 left first: its stage had "no live worker left", and the job failed.
    crew = one_finished_and_one_about_to()
    crew.do(crew.workers[0], Move.LEAVE)
    crew.lose("w1")
    assert len(crew.events("finished")) == 1
    assert crew.outcome is not None
    assert crew.outcome.exit_code == 0


def test_one_that_came_when_all_places_were_taken_gets_that_of_a_lost_worker() -> None:
    # It had said Hello and was never given a word again, whatever places became free.
    crew = able_to_step(Crew(Shape(2, 1)))
    spare = crew.add(7)
    crew.do(spare, Move.HELLO)
    crew.lose("w1")
    crew.run_until(lambda: spare.phase is Phase.RUNNING)
    assert spare.place is not None
    assert (spare.place.replica, spare.place.stage) == (1, 0)
    assert spare.state == crew.workers[0].state


def test_one_without_a_place_may_go_before_training_begins() -> None:
    # It was "lost before training began", which ended the job of those who had places.
    crew = Crew(Shape(2, 1))
    spare = crew.add(7)
    for worker in (*crew.workers[:2], spare):
        crew.do(worker, Move.HELLO)
    crew.lose(spare.uid)
    assert crew.run_to_the_end().exit_code == 0


def test_channels_that_break_because_of_losses_are_not_held_against_anybody() -> None:
    # Peers of a dying worker report broken channels before its own connection closes. Several
    # losses in a row, before a step could be finished, ended the job as "cannot reach its peers".
    num_losses = FRUITLESS_LIMIT + 1
    crew = Crew(Shape(num_losses + 1, 1))
    crew.run_until(lambda: crew.world.generation == 1)
    for number in range(num_losses, 0, -1):
        generation = crew.world.generation
        crew.tell(crew.workers[0], m.Broken(generation, "reset"))
        crew.lose(f"w{number}")
        crew.run_until(lambda known=generation: crew.world.generation == known + 1)  # type: ignore[misc]
    assert crew.run_to_the_end().exit_code == 0


def test_a_loss_before_training_that_no_agent_can_make_good_ends_the_job() -> None:
    # The lost worker was to be started again, and then the only agent left: nobody ever came, and
    # the others waited for ever.
    crew = Crew(Shape(1, 2), settings=WorldSettings(replace_after_s=1.0), has_agent=True)
    crew.run_until(lambda: len(crew.events("worker_joined")) == 2)
    crew.lose("w0")
    crew.lose_agent()
    for _ in range(4):
        crew.pass_time(0.5)
    assert crew.outcome is not None
    assert "worker number 0 is lost before training began" in crew.outcome.why


def test_the_wait_for_a_replacement_that_cannot_start_grows() -> None:
    # It doubled once and then stayed: a script that cannot start any more was started for ever.
    crew = Crew(Shape(2, 1), settings=WorldSettings(replace_after_s=1.0), has_agent=True)
    crew.run_until(lambda: crew.world.generation == 1)
    crew.lose("w1")
    delays = []
    for _ in range(3):
        began_s, num_workers = crew.now_s, len(crew.workers)
        while len(crew.workers) == num_workers:
            crew.pass_time(0.5)
            crew.agent_does_everything()
        delays.append(crew.now_s - began_s)
        crew.kill(crew.workers[-1])
        crew.agent_does_everything()
    assert delays == [1.0, 2.0, 4.0]
