"""What the events file says of a job whose coordinator was lost."""

from __future__ import annotations

from pathlib import Path

from everstep.core.events import EventLog
from everstep.membership.takeover import Told
from everstep.training.coordinating import read_told


def write(path: Path, *events: str) -> None:
    with EventLog(path) as log:
        for step, event in enumerate(events):
            log.emit(event, {"step": step})


def test_no_file_and_no_steps_tell_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_told(path) == Told()
    write(path, "started", "generation")
    assert not read_told(path).is_under_way


def test_the_last_step_is_found_behind_later_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "step", "step", "step", "worker_lost")
    assert read_told(path) == Told(last_step=2)
    assert read_told(path).is_under_way


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, "step", "step")
    with path.open("a") as file:
        file.write('{"event":"step","st')
    assert read_told(path) == Told(last_step=1)


def test_a_job_that_has_ended_is_not_under_way(tmp_path: Path) -> None:
    for name in ("finished", "failed", "stopped"):
        path = tmp_path / name
        write(path, "step", name)
        assert not read_told(path).is_under_way
