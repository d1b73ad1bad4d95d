"""What the time between two finished steps was for."""

from __future__ import annotations

from everstep.sim.stretches import Event, Kind, Stretch, stretches
from everstep.sim.trace import Change


def step(time_s: float) -> Event:
    return {"event": "step", "time": time_s}


def loss(time_s: float, replica: int, stage: int, event: str = "worker_lost") -> Event:
    return {"event": event, "time": time_s, "replica": replica, "stage": stage}


def generation(time_s: float, *lost: str) -> Event:
    return {"event": "generation", "time": time_s, "lost": list(lost)}


def cut(*events: Event) -> list[Stretch]:
    return list(stretches(events, num_stages=2))


def test_a_step_that_nothing_happened_in() -> None:
    assert cut(generation(0, "1:0"), step(1), step(3)) == [
        Stretch(kind=Kind.STEPS, seconds=2, changes=())
    ]


def test_a_loss_strikes_so_long_after_a_step_was_finished() -> None:
    assert cut(step(1), loss(1.5, 1, 0), generation(1.75, "1:0"), step(3)) == [
        Stretch(
            kind=Kind.RECOVERIES,
            seconds=2,
            changes=(Change(time_s=0.5, lost=(2,), joined=()),),
        )
    ]


def test_a_new_worker_comes_in_with_its_generation_and_not_when_it_joined() -> None:
    joined = loss(1.5, 1, 0, "worker_joined")
    first, second = cut(generation(0, "1:0"), step(1), joined, step(2), generation(2.5), step(4))
    assert first.kind is Kind.STEPS
    assert second.kind is Kind.JOINS
    assert second.changes == (Change(time_s=0.5, lost=(), joined=(2,)),)


def test_losses_together_are_one_change_at_the_time_of_the_first() -> None:
    (found,) = cut(
        step(1), loss(1.5, 0, 0), loss(1.6, 1, 1), generation(1.75, "0:0", "1:1"), step(3)
    )
    assert found.changes == (Change(time_s=0.5, lost=(0, 3), joined=()),)


def test_a_second_loss_in_a_recovery_is_a_change_of_its_own() -> None:
    (found,) = cut(
        step(1),
        *(loss(1.5, 0, 0), generation(1.75, "0:0")),
        *(loss(2.0, 1, 1), generation(2.25, "0:0", "1:1")),
        step(3),
    )
    assert [(change.time_s, change.lost) for change in found.changes] == [(0.5, (0,)), (1.0, (3,))]


def test_a_place_that_is_taken_again_at_once_was_lost_and_joined() -> None:
    """One who waited takes it: the generations before and after have the same empty places."""
    (found,) = cut(step(1), loss(1.5, 0, 1), generation(1.75), step(3))
    assert found.kind is Kind.RECOVERIES
    assert found.changes == (
        Change(time_s=0.5, lost=(1,), joined=()),
        Change(time_s=0.75, lost=(), joined=(1,)),
    )


def test_a_worker_that_moves_is_lost_to_its_place() -> None:
    (found,) = cut(step(1), loss(1.5, 0, 1, "moving"), generation(1.75, "0:1"), step(3))
    assert found.kind is Kind.RECOVERIES
    assert found.changes[0].lost == (1,)


def test_who_dies_while_it_waits_is_no_loss_to_the_others() -> None:
    first, second = cut(generation(0, "0:1"), step(1), loss(1.5, 0, 1), step(3), step(4))
    assert (first.kind, second.kind) == (Kind.STEPS, Kind.STEPS)


def test_a_loss_after_everybody_had_finished_the_step_strikes_the_next() -> None:
    """The step is told of when all have halted, after the loss and before the generation."""
    first, second = cut(step(1), loss(2.9, 0, 1), step(3), generation(3.1, "0:1"), step(4))
    assert (first.kind, second.kind) == (Kind.STEPS, Kind.RECOVERIES)
    assert second.changes == (Change(time_s=0.0, lost=(1,), joined=()),)


def test_the_same_workers_again_is_something_else() -> None:
    (found,) = cut(step(1), generation(1.5), step(3))
    assert found == Stretch(kind=Kind.OTHER, seconds=2, changes=())
