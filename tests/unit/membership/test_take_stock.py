"""What a new coordinator makes of what workers tell it."""

from __future__ import annotations

from typing import Any

from crew import MEETING, job_facts
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.facts import Copy, Member, RollBack, StepResult
from everstep.membership.memory import Memory
from everstep.membership.states import State
from everstep.membership.takeover import Heard, Stock, Told, awaited, take_stock


def member(number: int) -> Member:
    replica, stage = divmod(number, 2)
    uid = f"w{number}"
    return Member(
        replica=replica, stage=stage, uid=uid, number=number, pid=100 + number, data_address="h:1"
    )


ALL = tuple(map(member, range(4)))


def hello(number: int) -> m.Hello:
    return m.Hello(uid=f"w{number}", number=number, pid=100 + number, host="h", data_address="h:1")


def done(step: int, *, generation: int = 1) -> m.StepDone:
    return m.StepDone(generation=generation, step=step, seconds=0.1, loss=float(step))


def rejoin(number: int, **facts: Any) -> m.Rejoin:
    """In generation 1, at step 4, unless told otherwise."""
    replica, stage = divmod(number, 2)
    fields: dict[str, Any] = {"generation": 1, "members": ALL, "watermark": 4, "finished_step": 4}
    return m.Rejoin(
        hello=hello(number), replica=replica, stage=stage, job=job_facts(), **fields | facts
    )


def heard(*rejoins: m.Rejoin, **gone: str) -> Heard:
    return Heard(rejoins={each.uid: each for each in rejoins}, agents={}, gone=gone, waited_s=5.0)


def stock_of(*rejoins: m.Rejoin, **gone: str) -> Stock:
    return take_stock(heard(*rejoins, **gone), now_s=7.0, told=Told())


def test_when_all_are_back_and_nothing_was_under_way_training_goes_on() -> None:
    report = done(5)
    stock = stock_of(rejoin(0), rejoin(1, finished_step=5, report=report), rejoin(2), rejoin(3))
    assert stock.ending is None
    assert (stock.generation, stock.open_step) == (1, 5)
    assert stock.reports == {WorkerId(0, 1): report}
    assert [worker.state for worker in stock.workers] == [State.TRAINING] * 4
    assert not stock.gone
    assert not stock.fenced
    assert not stock.behind


def test_the_highest_watermark_that_anybody_heard_counts() -> None:
    late = rejoin(0, watermark=3, report=done(4))
    stock = stock_of(late, rejoin(1), rejoin(2), rejoin(3))
    assert stock.open_step == 5
    assert stock.behind == {"w0"}
    assert stock.reports == {}  # step 4 is closed


def test_whoever_is_missing_is_waited_for_and_then_gone() -> None:
    words = heard(rejoin(0), rejoin(1), rejoin(2))
    assert awaited(words) == {"w3"}
    stock = take_stock(words, now_s=7.0, told=Told())
    assert stock.gone == {"w3": "it did not come back within 5.0 s"}
    missing = stock.workers[-1]
    assert (missing.place, missing.hello.pid, missing.state) == ((1, 1), 103, State.TRAINING)


def test_nobody_waits_for_a_worker_whose_agent_saw_it_end() -> None:
    words = heard(rejoin(0), rejoin(1), rejoin(2), w3="killed by SIGKILL")
    assert awaited(words) == set()
    assert take_stock(words, now_s=7.0, told=Told()).gone == {"w3": "killed by SIGKILL"}


def test_who_is_missing_when_all_steps_are_done_has_left() -> None:
    over = {"watermark": 5, "finished_step": 5}
    stock = stock_of(*(rejoin(i, has_finished=i == 0, **over) for i in range(3)))
    assert [w.state for w in stock.workers] == [
        State.FINISHED,
        State.TRAINING,
        State.TRAINING,
        State.FINISHED,
    ]


def test_a_worker_that_was_lost_in_an_older_generation_is_fenced() -> None:
    three = {"generation": 2, "members": ALL[:3]}
    stock = stock_of(rejoin(0, **three), rejoin(1, **three), rejoin(2, **three), rejoin(3))
    assert list(stock.fenced) == ["w3"]
    assert stock.ending is None


def test_members_that_never_heard_of_the_generation_join_the_next() -> None:
    redo = RollBack(4, 0.5)
    stock = stock_of(
        rejoin(0, generation=2, redo=redo),
        *(
            rejoin(i, watermark=3, is_halted=True, ending="step 4 is taken again")
            for i in (1, 2, 3)
        ),
    )
    assert stock.ending is not None
    assert "before it had told 3 of the generation" in stock.ending
    assert stock.fenced == {}
    assert [worker.state for worker in stock.workers] == [State.TRAINING] + [State.STANDBY] * 3
    assert [worker.owed_redo for worker in stock.workers] == [None, redo, redo, redo]


def test_a_plan_that_not_all_have_heard_of_ends_the_generation() -> None:
    stock = stock_of(rejoin(0, replanned_from=7), rejoin(1), rejoin(2), rejoin(3))
    assert stock.ending is not None
    assert "a new plan" in stock.ending


def test_a_halt_that_was_under_way_is_carried_through() -> None:
    stock = stock_of(
        rejoin(0, ending="worker 9:9 is lost", is_halted=True, operations=2),
        *(rejoin(i) for i in (1, 2, 3)),
    )
    assert stock.ending == "under way when the coordinator was lost: worker 9:9 is lost"
    assert stock.workers[0].state is State.STANDBY
    assert stock.workers[0].operations == 2


def test_a_replacement_that_waits_keeps_its_place_and_has_no_state() -> None:
    three = {"members": ALL[:3]}
    new = m.Rejoin(hello=hello(3), replica=1, stage=1, job=job_facts())
    stock = stock_of(rejoin(0, **three), rejoin(1, **three), rejoin(2, **three), new)
    assert stock.ending is None
    assert stock.workers[-1].state is State.STANDBY
    assert stock.workers[-1].finished_step is None


def test_a_place_is_not_given_twice() -> None:
    new = m.Rejoin(hello=hello(7), replica=0, stage=0, job=job_facts())
    stock = stock_of(new, *(rejoin(i) for i in range(4)))
    assert stock.fenced == {"w7": "another worker holds its place, 0:0"}


def test_before_the_first_generation_all_hold_what_they_have_built() -> None:
    young = [m.Rejoin(hello=hello(i), replica=i // 2, stage=i % 2) for i in range(2)]
    ready = m.Rejoin(hello=hello(2), replica=1, stage=0, job=job_facts())
    stock = stock_of(*young, ready)
    assert stock.generation == 0
    assert [worker.state for worker in stock.workers] == [
        State.JOINING,
        State.JOINING,
        State.STANDBY,
    ]
    assert {worker.finished_step for worker in stock.workers} == {-1}


# What a worker remembers.


def resume(generation: int, step: int, **facts: Any) -> m.Resume:
    fields: dict[str, Any] = {
        "watermark": step - 1,
        "actions": (),
        "members": ALL,
        "meeting": MEETING,
    }
    return m.Resume(generation=generation, step=step, **fields | facts)


def remembering() -> Memory:
    memory = Memory(hello(0))
    memory.heard(m.Welcome(replica=0, stage=0, replicas=2, stages=2))
    memory.said(m.Ready(job_facts()))
    memory.heard(resume(1, 0))
    return memory


def told(memory: Memory) -> m.Rejoin:
    (word,) = memory.greeting()
    assert isinstance(word, m.Rejoin)
    return word


def test_a_worker_without_a_place_says_hello_again() -> None:
    assert Memory(hello(0)).greeting() == [hello(0)]


def test_a_step_that_was_said_to_nobody_is_told() -> None:
    memory = remembering()
    memory.said(done(0))
    assert (told(memory).finished_step, told(memory).report) == (0, done(0))
    assert told(memory).watermark == -1


def test_a_step_that_is_taken_back_is_forgotten() -> None:
    memory = remembering()
    memory.said(done(0))
    memory.said(m.Halted(1, 0))
    assert told(memory).is_halted
    memory.heard(resume(2, 0, undo=True))
    assert (told(memory).finished_step, told(memory).report) == (-1, None)
    assert not told(memory).is_halted


def test_a_step_that_comes_by_copy_is_told_with_its_loss() -> None:
    memory = remembering()
    copy = Copy(0, 1, 0)
    memory.heard(resume(2, 1, watermark=-1, copies=(copy,), result=StepResult(0.5, {})))
    assert told(memory).is_copying
    assert told(memory).finished_step == -1
    memory.said(m.Copied(2, 0))
    report = told(memory).report
    assert report is not None
    assert (told(memory).is_copying, report.step, report.loss) == (False, 0, 0.5)


def test_what_ends_a_generation_is_told_until_the_next_begins() -> None:
    for message in (m.Halt(1, "why"), m.Boundary(1, 3), m.Broken(1, "cause")):
        memory = remembering()
        assert told(memory).ending is None
        if isinstance(message, m.Broken):
            memory.said(message)
        else:
            memory.heard(message)
        assert told(memory).ending is not None
        memory.heard(resume(2, 0))
        assert told(memory).ending is None
