"""Every situation that survivors of small grids can be in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from everstep.core.ids import WorkerId
from everstep.membership.recovering import Hopeless, Recovery, Rung, Survivor
from everstep.membership.roster import Shape
from everstep.recovery.decide import decide_recovery

OPEN = 4
LOST = "lost"
CONDITIONS = (OPEN, OPEN - 1, None, LOST)
SHAPES = [Shape(1, 1), Shape(2, 1), Shape(3, 1), Shape(4, 1), Shape(1, 2), Shape(2, 2), Shape(3, 2)]
SHAPES += [Shape(2, 3)]


def situations(shape: Shape) -> Iterator[list[Survivor]]:
    """Each place finished the open step, or the one before, or holds nothing, or is lost."""
    places = shape.places()
    for conditions in product(CONDITIONS, repeat=len(places)):
        yield [
            Survivor(place=place, finished_step=None if step is None else int(step), operations=i)
            for i, (place, step) in enumerate(zip(places, conditions, strict=True))
            if step != LOST
        ]


def of_stage(survivors: list[Survivor], stage: int) -> list[Survivor]:
    return [survivor for survivor in survivors if survivor.place.stage == stage]


def missing_stages(survivors: list[Survivor], shape: Shape) -> list[int]:
    return [
        stage
        for stage in range(shape.stages)
        if all(s.finished_step is None for s in of_stage(survivors, stage))
    ]


def recoveries(shape: Shape) -> Iterator[tuple[list[Survivor], Recovery]]:
    for survivors in situations(shape):
        decision = decide_recovery(survivors, shape=shape, open_step=OPEN)
        if isinstance(decision, Recovery):
            yield survivors, decision


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_hopeless_exactly_when_a_stage_is_without_state_and_says_which(shape: Shape) -> None:
    for survivors in situations(shape):
        decision = decide_recovery(survivors, shape=shape, open_step=OPEN)
        missing = missing_stages(survivors, shape)
        assert isinstance(decision, Hopeless) == bool(missing)
        if isinstance(decision, Hopeless):
            assert decision.stage == missing[0]
            assert f"stage {missing[0]} " in decision.reason
            alive = of_stage(survivors, decision.stage)
            assert ("no live worker left" in decision.reason) == (not alive)
            assert all(str(survivor.place) in decision.reason for survivor in alive)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_rolls_forward_whenever_every_stage_has_the_step(shape: Shape) -> None:
    for survivors, decision in recoveries(shape):
        has_step = [
            any(s.finished_step == OPEN for s in of_stage(survivors, stage))
            for stage in range(shape.stages)
        ]
        assert decision.finished_step == (OPEN if all(has_step) else OPEN - 1)
        if any(has_step) and not all(has_step):
            assert f"step {OPEN} of stage {has_step.index(False)}" in decision.reason


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everybody_gets_to_the_same_step_and_nobody_is_told_two_ways(shape: Shape) -> None:
    for survivors, decision in recoveries(shape):
        after = {survivor.place: survivor.finished_step for survivor in survivors}
        for place in decision.undo:
            assert after[place] == OPEN
            after[place] = OPEN - 1
        targets = [copy.target for copy in decision.copies]
        assert len(targets) == len(set(targets))
        assert not decision.undo & set(targets)
        for copy in decision.copies:
            assert copy.source.stage == copy.target.stage
            assert copy.source not in targets
            assert after[copy.source] == decision.finished_step
            after[copy.target] = after[copy.source]
        assert set(after.values()) == {decision.finished_step}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_workers_of_a_stage_end_up_bitwise_equal(shape: Shape) -> None:
    """An undone step leaves rounding errors, so a stage undoes as one, or not at all."""
    for survivors, decision in recoveries(shape):
        for stage in range(shape.stages):
            is_exact = {survivor.place: True for survivor in of_stage(survivors, stage)}
            is_exact |= {place: False for place in decision.undo if place.stage == stage}
            for copy in decision.copies:
                if copy.source.stage == stage:
                    is_exact[copy.target] = is_exact[copy.source]
            assert len(set(is_exact.values())) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whoever_is_there_already_is_left_alone(shape: Shape) -> None:
    for survivors, decision in recoveries(shape):
        touched = decision.undo | {copy.target for copy in decision.copies}
        there = {s.place for s in survivors if s.finished_step == decision.finished_step}
        assert not touched & there
        for stage, rung in enumerate(decision.rungs):
            is_quiet = all(s.place in there for s in of_stage(survivors, stage))
            assert (rung is Rung.CONTINUE) == is_quiet
        assert decision.operations == min(
            s.operations for s in survivors if s.finished_step is not None
        )


def test_many_copies_are_spread_over_the_sources() -> None:
    survivors = [Survivor(place=WorkerId(replica, 0), finished_step=3) for replica in (0, 1)]
    survivors += [Survivor(place=WorkerId(replica, 0), finished_step=None) for replica in (2, 3, 4)]
    decision = decide_recovery(survivors, shape=Shape(5, 1), open_step=4)
    assert isinstance(decision, Recovery)
    assert [copy.source.replica for copy in decision.copies] == [0, 1, 0]
