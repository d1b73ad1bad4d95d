"""Reads the events file of a live run: its shape, durations, losses, joins and steps.

Durations come from the steps before the first loss, and the price of a change of generation from
the first recoveries; the rest of the file is only what predictions are compared with. Steps give
means, because slow ones are part of the sum that is predicted; recoveries are few, and the median
keeps one of them from telling what all cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import mean, median

from everstep.core.errors import ConfigError, TraceInvalid
from everstep.schedule.durations import Durations, StageDurations
from everstep.sim.stretches import Event, Stretch, stretches
from everstep.sim.trace import Trace, make_trace

ACTIONS = ("forward", "input_gradient", "weight_gradient")
CALIBRATING_FRACTION = 0.25
"""Of the recoveries, the first ones tell what a change costs; what the others took is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveRun:
    """From the first step that ran with measured durations to the last one."""

    replicas: int
    stages: int
    microbatches: int
    durations: Durations
    trace: Trace
    """A node is a worker."""

    num_steps: int
    step_ends_s: tuple[float, ...]
    stretches: tuple[Stretch, ...]
    """One for each of the steps."""

    halting_s: float
    """In the first recoveries. Where somebody joins, all halt by themselves."""

    forming_s: float
    """To decide and to form groups, in the same ones."""

    slowdown: float
    """What F, B and W took from the first loss on, over what they took before. Not used to predict:
    where it is not 1, the machine was slower, as when new processes start on the same cores."""

    @property
    def seconds(self) -> float:
        return self.step_ends_s[-1]


def read_events(path: Path) -> list[Event]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("events file", path, str(error)) from None
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            raise TraceInvalid(path.name, number, "not a JSON object") from None
        if not isinstance(event, dict) or not {"event", "time"} <= event.keys():
            raise TraceInvalid(path.name, number, "an event has `event` and `time`")
        events.append(event)
    return events


def live_run(events: Sequence[Event], *, name: str) -> LiveRun:
    started = _first(events, "started", name)
    replanned = _first(events, "replanned", name)
    replicas, stages = int(started["replicas"]), int(started["stages"])
    microbatches = _microbatches(replanned["actions"])
    steps = [event for event in events if event["event"] == "step"]
    counted = [event for event in steps if event["step"] >= replanned["from_step"]]
    if len(counted) < 3:
        raise ConfigError("events file", name, "too few steps after the first plan in seconds")
    begin_s = float(counted[0]["time"])
    first_loss_s = next((e["time"] for e in events if e["event"] == "worker_lost"), float("inf"))
    quiet = [event for event in counted if event["time"] < first_loss_s]
    if not quiet:
        raise ConfigError("events file", name, "no step was finished before the first loss")
    end_s = float(counted[-1]["time"])
    recoveries = _first_recoveries(events)
    return LiveRun(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        durations=durations_of(quiet, stages=stages, microbatches=microbatches),
        trace=_trace(events, begin_s, end_s, replicas=replicas, stages=stages, name=name),
        num_steps=len(counted) - 1,
        step_ends_s=tuple(float(event["time"]) - begin_s for event in counted[1:]),
        stretches=tuple(stretches(events, num_stages=stages))[-(len(counted) - 1) :],
        halting_s=_median_s(recoveries, "halting"),
        forming_s=_median_s(recoveries, "deciding", "groups"),
        slowdown=_slowdown(events, counted[0]["step"], num_workers=replicas * stages),
    )


def durations_of(steps: Sequence[Event], *, stages: int, microbatches: int) -> Durations:
    """The breakdown of a step is a mean over the workers that did such a thing. The first stage has
    no B of its own: it pays for it with W. The first and the last fetch samples before F. Otherwise
    stages are taken to be alike. What no part tells of lies between actions, such as sending, and
    is counted to F; waiting for peers is told of, and not taken from the run."""

    def spent(part: str) -> float:
        return mean(float(step["breakdown"][part]) for step in steps)

    between = mean(float(step["seconds"]) - sum(step["breakdown"].values()) for step in steps)
    fetching = spent("data") / microbatches
    forward = (spent("forward") + max(0.0, between)) / microbatches
    weight = spent("weight_gradient") / microbatches
    gradient = 0.0
    if stages > 1:
        gradient = spent("input_gradient") / microbatches * stages / (stages - 1)
        weight -= gradient / stages
    first = StageDurations(
        forward=forward + fetching, input_gradient=0.0, weight_gradient=gradient + weight
    )
    inner = StageDurations(forward=forward, input_gradient=gradient, weight_gradient=weight)
    last = replace(inner, forward=forward + fetching)
    return Durations(
        stages=(first, *[inner] * (stages - 2), last)[:stages],
        reduction=spent("reduction"),
        optimizer=spent("optimizer"),
    )


def _first(events: Sequence[Event], kind: str, name: str) -> Event:
    found = next((event for event in events if event["event"] == kind), None)
    if found is None:
        raise ConfigError("events file", name, f"has no `{kind}` event")
    return found


def _microbatches(actions: Mapping[str, str]) -> int:
    """From the plan's own words: `F0.5` is micro-batch 5 of replica 0."""
    numbers = [int(found) for row in actions.values() for found in re.findall(r"F\d+\.(\d+)", row)]
    return max(numbers) + 1


def _trace(
    events: Sequence[Event], begin_s: float, end_s: float, *, replicas: int, stages: int, name: str
) -> Trace:
    """A worker that moves leaves its place as if it were lost, and joins in another."""
    changes = {"worker_lost": True, "moving": True, "worker_joined": False}
    rows = [
        (
            event["time"] - begin_s,
            event["replica"] * stages + event["stage"],
            changes[event["event"]],
        )
        for event in events
        if event["event"] in changes and event["time"] > begin_s
    ]
    return make_trace(rows, name=name, num_nodes=replicas * stages, duration_s=end_s - begin_s)


def _slowdown(events: Sequence[Event], first_step: int, *, num_workers: int) -> float:
    """All workers together run as many actions in every step, however many are left."""
    before: list[float] = []
    after: list[float] = []
    found, num_live = before, num_workers
    for event in events:
        match event["event"]:
            case "worker_lost":
                found = after
            case "generation":
                num_live = num_workers - len(event["lost"])
            case "step" if event["step"] >= first_step:
                found.append(num_live * sum(float(event["breakdown"][part]) for part in ACTIONS))
            case _:
                pass
    return mean(after) / mean(before) if after else 1.0


def _first_recoveries(events: Sequence[Event]) -> Sequence[Event]:
    found = [event for event in events if event["event"] == "recovered"]
    return found[: ceil(CALIBRATING_FRACTION * len(found))]


def _median_s(events: Sequence[Event], *parts: str) -> float:
    """Of a run without recoveries there is nothing to tell."""
    times = [sum(float(event[part]) for part in parts) for event in events]
    return median(times) if times else 0.0
