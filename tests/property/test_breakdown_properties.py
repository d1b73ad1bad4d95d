"""The breakdown of a replayed run adds up, whatever happened in the run."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from everstep.sim.breakdown import break_down
from everstep.sim.live_run import live_run
from everstep.sim.stretches import Event, Kind, stretches
from everstep.sim.validate import validate

REPLICAS, STAGES = 3, 2
PLACES = [(replica, stage) for replica in range(REPLICAS) for stage in range(STAGES)]
PARTS = {"data": 0.0, "reduction": 0.1, "optimizer": 0.1}


@st.composite
def live_events(draw: st.DrawFn) -> list[Event]:
    """Of a run in which workers are lost and come back, and no stage is ever without one."""
    gaps = st.floats(0.01, 3.0)
    now_s = 100.0
    lost: list[tuple[int, int]] = []
    events: list[Event] = [
        {"event": "started", "time": now_s, "replicas": REPLICAS, "stages": STAGES},
        {"event": "generation", "time": now_s, "lost": []},
        {"event": "replanned", "time": now_s, "from_step": 0, "actions": {"0:0": "F0.0 F0.1"}},
    ]

    def tell(event: str, **fields: object) -> None:
        nonlocal now_s
        now_s += draw(gaps)
        events.append({"event": event, "time": now_s, **fields})

    def regroup() -> None:
        tell("generation", lost=[f"{replica}:{stage}" for replica, stage in lost])

    for step in range(draw(st.integers(3, 12))):
        if step > 1 and draw(st.booleans()):
            replica, stage = draw(st.sampled_from([place for place in PLACES if place not in lost]))
            if sum(other == stage for _, other in lost) < REPLICAS - 1:
                lost.append((replica, stage))
                tell("worker_lost", replica=replica, stage=stage)
                regroup()
                tell("recovered", halting=0.1, deciding=0.1, groups=0.1)
        elif step > 1 and lost and draw(st.booleans()):
            replica, stage = lost.pop()
            tell("worker_joined", replica=replica, stage=stage)
            regroup()
        elif draw(st.booleans()):
            regroup()
        times = {name: draw(st.floats(0.1, 1.0)) for name in ("forward", "weight_gradient")}
        breakdown = {**PARTS, **times, "input_gradient": 0.05}
        tell("step", step=step, seconds=draw(gaps), breakdown=breakdown)
    return events


@given(live_events())
def test_stretches_reach_from_the_first_step_to_the_last(events: list[Event]) -> None:
    ends_s = [event["time"] for event in events if event["event"] == "step"]
    found = list(stretches(events, num_stages=STAGES))
    assert [stretch.seconds for stretch in found] == [b - a for a, b in pairwise(ends_s)]


@given(live_events(), st.data())
def test_parts_add_up_to_the_whole(events: list[Event], data: st.DataObject) -> None:
    measured = list(stretches(events, num_stages=STAGES))
    predicted_s = data.draw(
        st.lists(st.floats(0, 100), min_size=len(measured), max_size=len(measured))
    )
    parts = break_down(measured, predicted_s)
    assert [part.kind for part in parts] == list(Kind)
    assert sum(part.number for part in parts) == len(measured)
    assert math.isclose(sum(part.predicted_s for part in parts), sum(predicted_s))
    assert math.isclose(sum(part.measured_s for part in parts), sum(s.seconds for s in measured))


@given(live_events())
def test_what_is_predicted_and_measured_of_a_run_is_what_its_parts_are(events: list[Event]) -> None:
    found = validate(live_run(events, name="drawn"))
    assert math.isclose(sum(part.predicted_s for part in found.parts), found.predicted_s)
    assert math.isclose(sum(part.measured_s for part in found.parts), found.measured_s)
    assert math.isclose(
        sum(part.difference_s for part in found.parts),
        found.predicted_s - found.measured_s,
        abs_tol=1e-9,
    )
    assert all((part.predicted_s > 0) == (part.number > 0) for part in found.parts)


@given(live_events(), st.floats(1.0, 3.0))
def test_what_is_predicted_does_not_depend_on_how_long_later_steps_took(
    events: list[Event], factor: float
) -> None:
    """Only how long after a step a loss struck is taken from what follows the first loss, and that
    no step was finished before it."""
    first_s = next((e["time"] for e in events if e["event"] == "worker_lost"), math.inf)
    stretched: list[Event] = []
    shift_s, before_s = 0.0, 0.0
    for event in events:
        if event["event"] == "step" and event["time"] > first_s:
            shift_s += (event["time"] - before_s) * (factor - 1)
        stretched.append({**event, "time": event["time"] + shift_s})
        before_s = event["time"]
    plain, other = (validate(live_run(found, name="drawn")) for found in (events, stretched))
    assert math.isclose(plain.predicted_s, other.predicted_s)
