"""Bytes on the wire."""

from __future__ import annotations

import math

import msgspec
import pytest

from crew import MEETING, job_facts
from everstep.core.errors import MessageInvalid
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.action_rows import pack_actions, unpack_actions
from everstep.membership.codec import MAX_MESSAGE_BYTES, encode, from_agent, from_worker, to_worker
from everstep.membership.facts import Copy, Member, RollBack, Seat, StepResult
from everstep.membership.planning import PlanRequest
from everstep.schedule.actions import Kind
from fake_planner import one_f_one_b

MEMBER = Member(replica=0, stage=0, uid="u", number=3, pid=7, data_address="h:1")
HELLO = m.Hello(uid="u", number=3, pid=7, host="h", data_address="h:1")

EXAMPLES_TO_COORDINATOR = [
    HELLO,
    m.Rejoin(hello=HELLO, replica=0, stage=0),
    m.Rejoin(
        hello=HELLO,
        replica=0,
        stage=0,
        job=job_facts(),
        generation=2,
        members=(MEMBER,),
        redo=RollBack(4, 0.5),
        watermark=4,
        finished_step=5,
        report=m.StepDone(generation=2, step=5, seconds=0.1, metrics={"a": 1.0}),
        ending="why",
    ),
    m.Ready(job_facts(clip_norm=0.5)),
    m.StepDone(generation=1, step=2, seconds=0.1, loss=3.0, metrics={"a": 1.0}),
    m.Halted(4, -1),
    m.Halted(4, None, operations=3),
    m.Broken(4, "a channel broke"),
    m.Resumed(4, 0.1, 0.2),
    m.Copied(4, 7),
    m.Failed("Traceback", "train.py:3"),
    m.Finished(),
    m.Heartbeat(),
]

EXAMPLES_TO_WORKER = [
    m.Welcome(replica=1, stage=2, replicas=3, stages=4),
    m.Resume(
        generation=2,
        step=5,
        watermark=4,
        actions=((Kind.FORWARD, 0, 1, None, 2),),
        members=(MEMBER,),
        meeting=MEETING,
        redo=RollBack(4, 0.5),
    ),
    m.Resume(
        generation=3,
        step=5,
        watermark=3,
        actions=(),
        members=(),
        meeting=MEETING,
        undo=True,
        copies=(Copy(1, 0, 2),),
        operations=7,
        result=StepResult(0.5, {"a": 1.0}),
    ),
    m.Boundary(2, 6),
    m.Replan(generation=2, from_step=9, actions=()),
    m.Watermark(2, 5),
    m.Halt(2, "why"),
    m.Stop("why", 1),
]


@pytest.mark.parametrize("message", EXAMPLES_TO_COORDINATOR, ids=lambda msg: type(msg).__name__)
def test_what_workers_say_comes_back_equal(message: m.FromWorker) -> None:
    assert from_worker.decode(encode(message)) == message


def test_what_agents_say_comes_back_equal() -> None:
    exited = m.WorkerExited(uid="u", number=3, pid=7, code=-9)
    hello = m.AgentHello(
        uid="a", host="h", workers=2, seats=(Seat(3, "0:3"),), running=(3,), ended=(exited,)
    )
    for message in (hello, exited):
        assert from_agent.decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES_TO_WORKER, ids=lambda msg: type(msg).__name__)
def test_what_workers_are_told_comes_back_equal(message: m.ToWorker) -> None:
    assert to_worker.decode(encode(message)) == message


def test_a_loss_that_is_not_a_number_survives_the_wire() -> None:
    done = m.StepDone(generation=1, step=0, seconds=0, loss=math.nan)
    received = from_worker.decode(encode(done))
    assert isinstance(received, m.StepDone)
    assert received.loss is not None
    assert math.isnan(received.loss)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"type": "Exec", "code": "x"}), "Invalid value 'Exec'"),
        (msgspec.msgpack.encode({"type": "Heartbeat", "x": 1}), "unknown field"),
        (msgspec.msgpack.encode({"type": "Halted", "generation": "1"}), "Expected `int`"),
        (encode(m.Welcome(replica=0, stage=0, replicas=1, stages=1)), "Invalid value"),
        ("text", "it is text"),
    ],
)
def test_a_frame_that_is_no_message_of_a_worker_is_refused(frame: bytes | str, why: str) -> None:
    with pytest.raises(MessageInvalid, match=why):
        from_worker.decode(frame)


def test_an_oversized_message_is_refused_on_both_sides() -> None:
    with pytest.raises(MessageInvalid, match="the limit is 16777216 bytes"):
        encode(m.Failed("x" * MAX_MESSAGE_BYTES, ""))
    with pytest.raises(MessageInvalid, match="the limit is"):
        from_worker.decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_actions_keep_their_order_and_peers_on_the_wire() -> None:
    plan = one_f_one_b(PlanRequest(replicas=2, stages=3, microbatches=4))
    for worker in (WorkerId(0, 0), WorkerId(1, 1), WorkerId(1, 2)):
        rows = pack_actions(plan.actions[worker])
        assert unpack_actions(rows, worker=worker) == plan.actions[worker]


def test_a_resume_for_a_large_job_is_small() -> None:
    plan = one_f_one_b(PlanRequest(replicas=1, stages=8, microbatches=64))
    members = [
        Member(
            replica=r,
            stage=s,
            uid="agent-0123456789ab-12-abcdef",
            number=r * 8 + s,
            pid=4_194_304,
            data_address="10.0.0.1:12345",
        )
        for r in range(512)
        for s in range(8)
    ]
    actions = pack_actions(plan.actions[WorkerId(0, 3)])
    resume = m.Resume(
        generation=1,
        step=0,
        watermark=-1,
        actions=actions,
        members=tuple(members),
        meeting=MEETING,
    )
    assert len(encode(resume)) < 1 << 20
