"""The events file."""

from __future__ import annotations

import json
import math
from pathlib import Path

from everstep.core.events import Event, EventLog


def test_an_event_is_on_disk_as_soon_as_it_is_emitted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, wall_time_s=lambda: 12.5) as log:
        log.emit("step", {"step": 3, "loss": 0.5})
        assert json.loads(path.read_text()) == {
            "event": "step",
            "time": 12.5,
            "step": 3,
            "loss": 0.5,
        }


def test_events_are_appended_and_told_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    heard: list[Event] = []
    for number in range(2):
        with EventLog(path) as log:
            log.subscribe(heard.append)
            log.emit("started", {"number": number})
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1]
    assert [event["number"] for event in heard] == [0, 1]


def test_a_loss_that_is_not_a_number_is_null_and_the_line_stays_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("step", {"loss": math.nan, "metrics": {"a": math.inf}, "list": [1.0, -math.inf]})
    event = json.loads(path.read_text(), parse_constant=_no_json)
    assert event["loss"] is None
    assert event["metrics"] == {"a": None}
    assert event["list"] == [1.0, None]


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_recent_events_are_kept_without_a_file() -> None:
    log = EventLog()
    for number in range(100):
        log.emit("step", {"step": number})
    assert [event["step"] for event in log.recent()] == list(range(50, 100))
