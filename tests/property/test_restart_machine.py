"""Random interleavings of a job with checkpoints, with and without logs, in which stages lose their
last worker, too.

Whatever happened, each step is told once, no update is missing or applied twice, and the job ends.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from crew import Crew, job_facts
from crew_worker import CrewWorker, Phase
from everstep.membership import messages as m
from everstep.membership.facts import LogFacts
from everstep.membership.roster import Shape
from everstep.membership.silence import Patience
from everstep.membership.world import WorldSettings

SHAPES = [Shape(1, 2), Shape(2, 1), Shape(2, 2), Shape(1, 3)]
STEPS = 6


@settings(deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    picks=st.lists(st.binary(min_size=1, max_size=40), max_size=12),
    losses=st.lists(st.integers(0, 3), max_size=3),
    is_logged=st.booleans(),
    num_damaged=st.integers(0, 4),
)
def test_no_step_is_lost_or_told_twice(
    shape: Shape, picks: list[bytes], losses: list[int], is_logged: bool, num_damaged: int
) -> None:
    log = LogFacts(budget_bytes=1) if is_logged else None
    crew = Crew(
        shape,
        job=job_facts(STEPS, is_saved=True, log=log),
        settings=WorldSettings(
            profile_steps=0, patience=Patience(tick_gap_s=1e9), replace_after_s=1.0
        ),
        has_agent=True,
    )
    crew.wire.num_damaged = num_damaged
    crew.run_until(lambda: len(crew.workers) == shape.num_workers)
    for number, burst in enumerate(picks):
        for pick in burst:
            choices = crew.choices()
            if not choices:
                break
            choices[pick % len(choices)]()
        running = _running(crew)
        if running and burst[0] % 2:
            crew.tell(running[-1], m.SaveWanted(running[-1].generation))
        # Nobody is killed before the job has begun: that ends it, and should.
        if number < len(losses) and running and crew.outcome is None:
            crew.kill(running[losses[number] % len(running)])
    outcome = crew.run_to_the_end(rounds=2000)
    assert outcome.exit_code == 0, outcome.why
    assert crew.event_values("step", "step") == list(range(STEPS))
    for worker in crew.workers:
        if worker.has_finished and worker.state is not None:
            assert [update.step for update in worker.state.applied] == list(range(STEPS))


def _running(crew: Crew) -> list[CrewWorker]:
    return [w for w in crew.workers if w.phase is Phase.RUNNING]
