"""Live workers that move to a stage that was hit harder."""

from __future__ import annotations

from crew import Crew, job_facts
from everstep.core.ids import WorkerId
from everstep.membership.planning import PlanRequest
from everstep.membership.roster import Shape
from everstep.membership.world import WorldSettings
from everstep.schedule.normalize import Move, Normalize, Stay

STEPS = 12


class Once:
    """Moves 0:0 to 0:1 when both are as they were after the losses; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[frozenset[WorkerId], float]] = []

    def __call__(self, request: PlanRequest, *, horizon_s: float) -> Normalize | Stay:
        self.asked.append((request.lost, horizon_s))
        donor, vacancy = WorkerId(0, 0), WorkerId(0, 1)
        if vacancy not in request.lost or donor in request.lost:
            return Stay(reason="it is done")
        return Normalize(
            moves=(Move(donor, vacancy),),
            lost=frozenset({donor, *request.lost}) - {vacancy},
            period_before=2.0,
            period_after=1.0,
            pays_after_steps=1.0,
            reason="it pays",
        )


def crew_of(normalize: Once, *, replace_after_s: float | None = None) -> Crew:
    settings = WorldSettings(profile_steps=1, replace_after_s=replace_after_s)
    shape, job = Shape(3, 2), job_facts(STEPS)
    crew = Crew(shape, job=job, settings=settings, has_agent=True, normalize=normalize)
    crew.run_until(lambda: len(crew.events("step")) >= 3)
    return crew


def test_a_worker_moves_to_the_harder_hit_stage_and_nothing_is_lost() -> None:
    normalize = Once()
    crew = crew_of(normalize)
    crew.lose("w1", "w3")  # 0:1 and 1:1
    crew.run_until(lambda: len(crew.events("generation")) == 2)
    crew.pass_time(0.1)
    assert crew.event_values("moving", "to") == ["0:1"]
    assert crew.run_to_the_end().exit_code == 0
    assert crew.event_values("step", "step") == list(range(STEPS))
    moved = crew.worker("w0+")
    assert moved.place is not None
    assert (moved.place.replica, moved.place.stage) == (0, 1)
    assert crew.events("generation")[-1].fields["lost"] == ["0:0", "1:1"]
    assert len(crew.events("worker_lost")) == 2


def test_each_generation_is_weighed_once_with_the_time_that_is_left() -> None:
    normalize = Once()
    crew = crew_of(normalize)
    crew.lose("w1", "w3")
    crew.run_until(lambda: len(crew.events("generation")) == 2)
    for _ in range(3):
        crew.pass_time(0.01)
    assert len(normalize.asked) == 1
    (lost, horizon_s) = normalize.asked[0]
    assert lost == {WorkerId(0, 1), WorkerId(1, 1)}
    assert horizon_s > 0


def test_nobody_moves_while_the_lost_are_going_to_be_replaced() -> None:
    normalize = Once()
    crew = crew_of(normalize, replace_after_s=1.0)
    crew.lose("w1", "w3")
    assert crew.run_to_the_end().exit_code == 0
    assert normalize.asked == []


def test_a_moved_worker_that_dies_on_the_way_is_started_again() -> None:
    crew = crew_of(Once())
    crew.lose("w1", "w3")
    crew.run_until(lambda: len(crew.events("generation")) == 2)
    crew.pass_time(0.1)
    crew.agent_does_everything()
    crew.kill(crew.worker("w0+"))  # before it has said Hello
    crew.agent_does_everything()
    crew.pass_time(2.0)
    assert crew.run_to_the_end().exit_code == 0
    assert crew.worker("w0++").place is not None
