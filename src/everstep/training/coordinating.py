"""The coordinator of a job with its planner and its store: what `everstep run` starts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.core.events import EventLog
from everstep.membership.access import Bind
from everstep.membership.coordinator import Coordinator
from everstep.membership.facts import Meeting
from everstep.membership.planning import PlanRequest
from everstep.membership.roster import Shape
from everstep.membership.takeover import Told
from everstep.membership.world import World, WorldSettings
from everstep.recovery.decide import decide_recovery
from everstep.recovery.rebuild import choose_logs, plan_replay
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.normalize import Normalize, Stay, decide_normalization
from everstep.schedule.plan import Plan
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem

PLAN_EFFORT = Effort(improve_s=0.05)
"""Little: at failure time everybody waits for the plan."""

MOVE_S = 5.0
"""What moving a worker costs: its process is started again, its new state copied, and generations
change twice meanwhile."""

TAIL_BYTES = 64 << 20
"""Of the events file, where the last step is looked for: beyond what one generation of 4,096
workers writes."""


@contextmanager
def coordinator_of(
    shape: Shape,
    *,
    bind: Bind,
    events: EventLog,
    settings: WorldSettings | None = None,
    told: Told | None = None,
) -> Iterator[Coordinator]:
    """Listens, with the store beside it; the caller serves it. `told` is what the events file says
    already, should this coordinator take the place of another."""
    # Loads torch, which the planner's commands must not.
    from everstep.comm.store import start_store

    with start_store(bind.host) as store:
        meeting = Meeting(
            host=store.address.host, port=store.address.port, token=secrets.token_hex(16)
        )
        world = World(
            shape,
            settings,
            planner=plan_for,
            decide=decide_recovery,
            meeting=meeting,
            normalize=normalize_for,
            plan_replay=plan_replay,
            choose_logs=choose_logs,
        )
        yield Coordinator(world, events=events, bind=bind, told=told)


def read_told(path: Path) -> Told:
    """What the last coordinator that wrote there has told of a job that it did not end."""
    if not path.exists():
        return Told()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    has_finished = False
    for line in reversed(lines):
        match _event(line):
            case {"event": "failed" | "stopped"}:
                return Told()
            case {"event": "finished"}:
                has_finished = True
            case {"event": "step", "step": int(step)}:
                return Told(last_step=step, has_finished=has_finished)
            case _:
                pass
    return Told(has_finished=has_finished)


def _event(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:  # cut off, by the limit or by the writer's death
        return None


def plan_for(request: PlanRequest) -> Plan:
    """The planner's answer to the coordinator's question."""
    return plan(_problem(request), PLAN_EFFORT)


def normalize_for(request: PlanRequest, *, horizon_s: float) -> Normalize | Stay:
    return decide_normalization(
        _problem(request), copy=MOVE_S, horizon=horizon_s, effort=PLAN_EFFORT
    )


def _problem(request: PlanRequest) -> Problem:
    return Problem(
        replicas=request.replicas,
        stages=request.stages,
        microbatches=request.microbatches,
        lost=request.lost,
        durations=_durations(request),
        in_flight=request.in_flight,
    )


def _durations(request: PlanRequest) -> Durations:
    if request.durations is None:
        return Durations.uniform(request.stages)
    profiles = request.durations
    return Durations(
        stages=tuple(
            StageDurations(
                forward=profile.forward,
                input_gradient=profile.input_gradient,
                weight_gradient=profile.weight_gradient,
            )
            for profile in profiles
        ),
        transfer=max(profile.transfer for profile in profiles),
        reduction=max(profile.reduction for profile in profiles),
        optimizer=max(profile.optimizer for profile in profiles),
    )
