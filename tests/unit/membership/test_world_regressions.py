"""Bugs of the coordinator that were found the hard way: by killing workers at random."""

from __future__ import annotations

from everstep.membership import messages as m
from everstep.membership.facts import JobFacts, Meeting, StageProfile
from everstep.membership.roster import Shape
from everstep.membership.traffic import Disconnected, Effect, Input, Received, Send
from everstep.membership.world import World
from everstep.recovery.decide import decide_recovery
from fake_planner import one_f_one_b

JOB = JobFacts(microbatches=2, steps=20, batch_size=8, seed=0, digest="d")
PROFILE = StageProfile(
    forward=0.25, input_gradient=0.25, weight_gradient=0.25, transfer=0, reduction=0, optimizer=0
)
SURVIVORS = ("w0", "w1", "w2")


class Stage2x2:
    """A job of 2 x 2 workers, w0 to w3, that has finished step 0."""

    def __init__(self) -> None:
        self.world = World(
            Shape(2, 2),
            planner=one_f_one_b,
            decide=decide_recovery,
            meeting=Meeting(host="127.0.0.1", port=29500),
        )
        for number in range(4):
            self.join(f"w{number}", number)
        self.finish(0, *SURVIVORS, "w3")

    def tell(self, event: Input) -> list[Effect]:
        return self.world.handle(event, now_s=0.0)

    def join(self, uid: str, number: int) -> list[Effect]:
        hello = m.Hello(uid=uid, number=number, pid=1, host="h", data_address="a:1")
        self.tell(Received(uid, hello))
        return self.tell(Received(uid, m.Ready(JOB)))

    def finish(self, step: int, *uids: str) -> None:
        for uid in uids:
            done = m.StepDone(generation=self.world.generation, step=step, seconds=0.1, loss=1.0)
            self.tell(Received(uid, done))

    def halt(self, finished_step: int, *uids: str) -> list[Effect]:
        effects: list[Effect] = []
        for uid in uids:
            effects = self.tell(Received(uid, m.Halted(self.world.generation, finished_step, 0)))
        return effects


def resumes(effects: list[Effect]) -> dict[str, m.Resume]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return {send.uid: send.message for send in sends if isinstance(send.message, m.Resume)}


def test_a_profile_that_comes_when_others_wait_at_a_boundary_is_no_error() -> None:
    """The last worker's Profile came when all others had halted at a boundary and did not count.
    A stage then had no profiles, and the coordinator fell over their median.
    Whoever is in the generation counts."""
    job = Stage2x2()
    job.tell(Disconnected("w3"))
    job.halt(0, *SURVIVORS)
    job.join("new", 3)
    job.finish(1, *SURVIVORS)
    job.finish(2, *SURVIVORS)
    for uid in ("w0", "w2"):
        job.tell(Received(uid, m.Profile(job.world.generation, PROFILE)))
        job.halt(2, uid)
    job.tell(Received("w1", m.Profile(job.world.generation, PROFILE)))
    assert resumes(job.halt(2, "w1")).keys() == {*SURVIVORS, "new"}
    assert job.world.plans.durations is not None


def test_a_new_worker_waits_for_a_boundary_when_the_others_were_interrupted() -> None:
    """A new worker came in while the others were interrupted, perhaps in an evaluation.
    Its script had not seen the step before, so it never took part in that.
    It now waits until all are on their way into a step: at once, if they are."""
    job = Stage2x2()
    job.tell(Disconnected("w3"))
    job.join("new", 3)
    first = resumes(job.halt(0, *SURVIVORS))
    assert first.keys() == set(SURVIVORS)
    assert {resume.boundary for resume in first.values()} == {0}
    assert all(len(resume.members) == 3 for resume in first.values())
    second = resumes(job.halt(0, *SURVIVORS))
    assert second.keys() == {*SURVIVORS, "new"}
    assert {resume.boundary for resume in second.values()} == {None}
    assert [(copy.source, copy.target) for copy in second["new"].copies] == [(0, 1)]
