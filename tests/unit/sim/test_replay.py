"""Validation: a live run's losses through the simulator.

`recorded/three-losses.jsonl` is the events file, cut to what is read, of a live run on emulated
devices: 3 replicas x 4 stages x 6 micro-batches, 90 ms for F, B and W together, three workers
killed and replaced.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import everstep
from everstep.core.errors import ConfigError, TraceInvalid
from everstep.sim.live_run import live_run, read_events
from everstep.sim.validate import validate

RECORDED = Path(__file__).parent / "recorded" / "three-losses.jsonl"


def test_the_recorded_run_is_predicted_within_five_percent() -> None:
    found = validate(live_run(read_events(RECORDED), name="recorded"))
    assert found.num_steps == 84
    assert abs(found.error_fraction) < 0.05
    assert [span.num_lost for span in found.spans] == [0, 1, 0, 1, 2, 1, 0]
    assert all(abs(s.predicted_steps - s.measured_steps) < 2 for s in found.spans)


def test_a_wrong_period_would_be_noticed() -> None:
    """The replay can fail: durations a tenth too long miss the bar."""
    events = [
        {
            **event,
            "breakdown": {part: 1.1 * value for part, value in event["breakdown"].items()},
        }
        if event["event"] == "step"
        else event
        for event in read_events(RECORDED)
    ]
    found = validate(live_run(events, name="slower"))
    assert found.error_fraction > 0.05
    assert not found.is_within_bar


def test_the_shape_and_durations_come_from_the_file() -> None:
    live = live_run(read_events(RECORDED), name="recorded")
    assert (live.replicas, live.stages, live.microbatches) == (3, 4, 6)
    first, second, *_ = live.durations.stages
    assert first.input_gradient == 0
    assert second.total == pytest.approx(0.09, rel=0.06)
    assert first.total == pytest.approx(second.total)


def test_a_worker_that_moves_leaves_its_place_and_joins_in_another() -> None:
    """Moves were not read, so a run with one had too few losses from there on: a worker joined in
    the vacancy, and nobody had left the place it came from."""
    events = read_events(RECORDED)
    lost = next(event for event in events if event["event"] == "worker_lost")
    moved = [
        {**event, "event": "moving", "to": "0:0"} if event is lost else event for event in events
    ]
    there, here = (live_run(found, name="recorded").trace for found in (moved, events))
    assert there.is_loss.tolist() == here.is_loss.tolist()
    assert there.node.tolist() == here.node.tolist()


def test_the_command_gives_a_verdict() -> None:
    shown = everstep(f"simulate validate {RECORDED}")
    assert shown.status == 0
    assert "(<= 5%: met)" in shown.stdout
    document = everstep(f"simulate validate {RECORDED} --json").json()
    assert document["num_steps"] == 84


def test_a_line_that_is_no_event_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "started", "time": 0}\n{"event"')
    with pytest.raises(TraceInvalid, match="line 2"):
        read_events(path)


def test_a_run_without_a_plan_in_seconds_cannot_be_replayed() -> None:
    started = {"event": "started", "time": 0.0, "replicas": 2, "stages": 2}
    with pytest.raises(ConfigError, match="replanned"):
        live_run([json.loads(json.dumps(started))], name="short")
