"""Fault scripts: their text, their chance, and when they act. No worker is harmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.core import points
from everstep.core.errors import ConfigError, PeerLost
from everstep.core.ids import WorkerId
from everstep.core.points import Point
from everstep.testing.faults import (
    Break,
    FaultScript,
    Freeze,
    Kill,
    Moment,
    Slow,
    install,
    played_faults,
    random_kills,
)

HERE = WorkerId(1, 2)


@pytest.fixture(autouse=True)
def _unwatched() -> object:
    yield
    points.watch(None)


def passes(point: Point, *steps: int) -> None:
    points.stand_at(HERE)
    for step in steps:
        points.passing(point, step=step)


def test_a_script_is_what_its_text_says() -> None:
    text = "kill 1:2 after-optimizer@7; freeze 0:1 before-send@3#2 for 6; slow 0:0 halted@1 for 0.5"
    script = FaultScript.parse(text)
    assert script.faults == (
        Kill(Moment(HERE, Point.AFTER_OPTIMIZER, 7)),
        Freeze(Moment(WorkerId(0, 1), Point.BEFORE_SEND, 3, 2), 6.0),
        Slow(Moment(WorkerId(0, 0), Point.HALTED, 1), 0.5),
    )
    assert str(script) == text
    assert FaultScript.parse(" ; ").faults == ()


@pytest.mark.parametrize(
    "text",
    [
        "kill 1:2 after-lunch@7",
        "kill 1:2 after-send",
        "kill 1:2 after-send@7 for 3",
        "freeze 1:2 after-send@7",
        "maim 1:2 after-send@7",
    ],
)
def test_a_fault_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FaultScript.parse(f"kill 0:0 halted@1; {text}")


def test_a_fault_acts_at_the_first_passing_in_its_step_or_later(tmp_path: Path) -> None:
    install(FaultScript.parse("break 1:2 before-send@7"), log=tmp_path / "log")
    passes(Point.BEFORE_SEND, 5, 6)
    passes(Point.AFTER_SEND, 7)
    assert played_faults(tmp_path / "log") == set()
    with pytest.raises(PeerLost, match="before-send"):
        passes(Point.BEFORE_SEND, 8)
    assert played_faults(tmp_path / "log") == {0}


def test_a_fault_of_a_later_occurrence_waits_for_it(tmp_path: Path) -> None:
    install(FaultScript.parse("break 1:2 before-send@7#3"), log=tmp_path / "log")
    passes(Point.BEFORE_SEND, 6, 7, 7)
    with pytest.raises(PeerLost):
        passes(Point.BEFORE_SEND, 7)


def test_a_fault_of_another_place_does_not_act(tmp_path: Path) -> None:
    install(FaultScript.parse("break 1:1 before-send@0"), log=tmp_path / "log")
    passes(Point.BEFORE_SEND, 0, 1)


def test_a_fault_acts_once_even_when_a_replacement_passes_its_point(tmp_path: Path) -> None:
    script = FaultScript((Break(Moment(HERE, Point.HALTED, 0)),))
    install(script, log=tmp_path / "log")
    with pytest.raises(PeerLost):
        passes(Point.HALTED, 0)
    passes(Point.HALTED, 1)
    install(script, log=tmp_path / "log")  # as the replacement's script does
    passes(Point.HALTED, 2)


def test_random_kills_are_a_function_of_the_seed_and_spare_every_stage() -> None:
    for seed in range(50):
        script = random_kills(seed, replicas=3, stages=4, steps=60, number=8)
        assert script == random_kills(seed, replicas=3, stages=4, steps=60, number=8)
        assert FaultScript.parse(str(script)) == script
        places = [fault.at.place for fault in script.faults]
        assert len(set(places)) == 8
        assert all(len([p for p in places if p.stage == stage]) == 2 for stage in range(4))
    assert random_kills(1, replicas=3, stages=4, steps=60, number=5) != random_kills(
        2, replicas=3, stages=4, steps=60, number=5
    )


def test_more_random_kills_than_the_stages_can_bear_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4"):
        random_kills(0, replicas=3, stages=2, steps=60, number=5)
