"""Stages that lost their last worker, as the coordinator goes about them, without a socket."""

from __future__ import annotations

from crew import Crew, Move, job_facts
from everstep.membership import messages as m
from everstep.membership.facts import LogFacts
from everstep.membership.rebuilding import NEW_WORKER_WITHIN_S, REPLAY_LIMIT
from everstep.membership.roster import Shape
from everstep.membership.silence import Patience
from everstep.membership.traffic import Send
from everstep.membership.world import WorldSettings

LOG = LogFacts(budget_bytes=1 << 20)
STEPS = 8


def crew_that_logs(
    shape: Shape | None = None,
    *,
    is_saved: bool = False,
    log: LogFacts | None = LOG,
    replace_after_s: float | None = 1.0,
    has_agent: bool = True,
    after_steps: int = 3,
) -> Crew:
    crew = Crew(
        shape or Shape(1, 3),
        job=job_facts(STEPS, log=log, is_saved=is_saved),
        settings=WorldSettings(
            profile_steps=0, patience=Patience(tick_gap_s=1e9), replace_after_s=replace_after_s
        ),
        has_agent=has_agent,
    )
    crew.run_until(lambda: len(crew.events("step")) >= after_steps)
    return crew


def sent_to(crew: Crew, uid: str, kind: type[m.ToWorker]) -> list[m.ToWorker]:
    return [
        effect.message
        for effect in crew.effects
        if isinstance(effect, Send) and effect.uid == uid and isinstance(effect.message, kind)
    ]


def check_finished(crew: Crew) -> None:
    outcome = crew.run_to_the_end()
    assert outcome.exit_code == 0, outcome.why
    assert crew.event_values("step", "step") == list(range(STEPS))


def test_the_others_wait_with_their_states_until_a_new_worker_is_there() -> None:
    crew = crew_that_logs()
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("awaiting")))
    assert crew.event_values("awaiting", "stages") == [[1]]
    assert len(crew.events("generation")) == 1
    crew.run_until(lambda: len(crew.events("generation")) == 2)
    (rebuilding,) = crew.events("rebuilding")
    assert rebuilding.fields["stages"] == [1]
    assert rebuilding.fields["rebuilt"] == ["0:1"]
    formed = crew.events("generation")[-1]
    assert formed.fields["rungs"] == {"0": "continue", "1": "replay", "2": "continue"}
    check_finished(crew)
    assert len(crew.events("rebuilt")) == 1
    assert crew.events("restarting") == []


def test_the_new_worker_is_started_at_once_though_others_would_be_later() -> None:
    """Everybody waits for it, which is no time to be patient."""
    crew = crew_that_logs(replace_after_s=1000.0)
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("rebuilding")))
    assert crew.now_s == 0.0


def test_a_loss_while_the_others_wait_makes_the_range_larger() -> None:
    crew = crew_that_logs()
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("awaiting")))
    crew.lose("w2")
    check_finished(crew)
    assert crew.event_values("rebuilding", "stages") == [[1, 2]]


def test_a_replacement_lost_in_the_replay_is_replaced() -> None:
    crew = crew_that_logs()
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("rebuilding")))
    crew.lose("w1+")
    check_finished(crew)
    assert crew.event_values("rebuilding", "stages") == [[1], [1]]
    assert len(crew.events("rebuilt")) == 1


def test_a_helper_lost_in_the_replay_is_rebuilt_as_well() -> None:
    crew = crew_that_logs()
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("rebuilding")))
    crew.lose("w2")
    check_finished(crew)
    assert crew.event_values("rebuilding", "stages") == [[1], [1, 2]]


def test_both_workers_of_a_stage_are_rebuilt_or_the_second_copies() -> None:
    crew = crew_that_logs(Shape(2, 2))
    crew.lose("w1", "w3")
    check_finished(crew)
    assert crew.event_values("rebuilding", "stages") == [[1]]
    states = {w.state for w in crew.workers if w.place and w.place.stage == 1 and w.has_finished}
    assert len(states) == 1


def test_a_stage_that_still_has_a_worker_is_copied_and_not_replayed() -> None:
    crew = crew_that_logs(Shape(2, 2))
    crew.lose("w1")
    check_finished(crew)
    assert crew.events("rebuilding") == []


def test_a_checkpoint_is_durable_when_every_stage_has_its_part() -> None:
    """What is logged before it is forgotten then, on all workers, and no sooner."""
    crew = crew_that_logs(is_saved=True)
    crew.tell(crew.workers[2], m.SaveWanted(1))
    crew.run_until(lambda: len(crew.events("step")) >= 4)
    crew.effects.clear()
    step = 3
    for worker in crew.workers[:2]:
        crew.tell(worker, m.Saved(step=step))
    assert [sent_to(crew, w.uid, m.Durable) for w in crew.workers] == [[], [], []]
    crew.tell(crew.workers[2], m.Saved(step=step))
    assert [sent_to(crew, w.uid, m.Durable) for w in crew.workers] == [[m.Durable(step)]] * 3


def test_a_replay_begins_with_the_newest_checkpoint_that_is_durable() -> None:
    crew = crew_that_logs(is_saved=True)
    crew.tell(crew.workers[2], m.SaveWanted(1))
    crew.run_until(lambda: bool(crew.events("checkpoint")))
    (saved,) = crew.event_values("checkpoint", "step")
    crew.run_until(lambda: len(crew.events("step")) >= 6)
    crew.lose("w1")
    check_finished(crew)
    assert crew.event_values("rebuilding", "checkpoint") == [saved]


def test_a_replay_that_could_not_read_something_is_planned_anew() -> None:
    crew = crew_that_logs()
    crew.wire.num_damaged = 1
    crew.lose("w1")
    check_finished(crew)
    assert len(crew.events("rebuilding")) == 2
    assert len(crew.events("rebuilt")) == 1


# What stands in the way is said.


def why_given_up(crew: Crew) -> str:
    outcome = crew.run_to_the_end()
    assert outcome.exit_code == 1
    return outcome.why


def test_without_logs_nothing_is_replayed() -> None:
    crew = crew_that_logs(log=None)
    crew.lose("w1")
    assert "stage 1 has no live worker left (last finished step: 2)" in why_given_up(crew)


def test_where_nobody_is_started_again_it_is_said() -> None:
    crew = crew_that_logs(replace_after_s=None)
    crew.lose("w1")
    assert "nobody is started in the place of stage 1" in why_given_up(crew)


def test_where_everybody_is_lost_it_is_said() -> None:
    crew = crew_that_logs()
    crew.lose("w0", "w1", "w2")
    assert "nobody is left who has logged anything" in why_given_up(crew)


def test_a_new_worker_is_waited_for_so_long() -> None:
    crew = crew_that_logs()
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("awaiting")))
    assert crew.agent is not None
    crew.agent.down.clear()  # it never starts one
    assert "no new worker has come within 60 s" in why_given_up(crew)


def test_replays_that_fail_again_and_again_are_given_up() -> None:
    crew = crew_that_logs()
    crew.wire.num_damaged = REPLAY_LIMIT
    crew.lose("w1")
    why = why_given_up(crew)
    assert f"{REPLAY_LIMIT} replays have failed, the last one: worker 0:1" in why
    assert "it is damaged" in why


def test_what_was_waited_for_is_forgotten_when_everybody_begins_again() -> None:
    """Regression: no new worker came for a minute, so all were started again. The next tick still
    thought that all waited for one, and formed a generation of the few that were back."""
    crew = crew_that_logs(is_saved=True)
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("awaiting")))
    assert crew.agent is not None
    crew.agent.down.clear()
    for _ in range(int(NEW_WORKER_WITHIN_S) + 2):
        if not crew.events("restarting"):
            crew.pass_time(1.0)
    assert len(crew.events("restarting")) == 1
    crew.agent_does_everything()
    first = crew.workers[-3]
    crew.do(first, Move.HELLO)
    crew.hear_everything(first)
    crew.pass_time(1.0)
    assert len(crew.events("generation")) == 1, "two are missing"
    check_finished(crew)
    assert len(crew.events("restarting")) == 1


def test_after_a_new_beginning_replays_are_tried_again() -> None:
    """Regression: three replays had failed, and all began again. From then on no loss was replayed
    any more, though what had failed was long gone."""
    crew = crew_that_logs(is_saved=True)
    crew.wire.num_damaged = REPLAY_LIMIT
    crew.lose("w1")
    crew.run_until(lambda: bool(crew.events("restarting")))
    crew.run_until(lambda: len(crew.events("step")) >= 5)
    crew.lose(next(w.uid for w in crew.workers if w.number == 1 and w.is_alive))
    check_finished(crew)
    assert len(crew.events("restarting")) == 1
    assert len(crew.events("rebuilding")) == REPLAY_LIMIT + 1
