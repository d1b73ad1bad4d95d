"""A planner for tests: plain 1F1B per replica, lost workers not supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.core.ids import WorkerId
from everstep.membership.planning import PlanRequest
from everstep.schedule.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class FakePlan:
    period: float
    lower_bound: float
    actions: Mapping[WorkerId, Sequence[Action]]


def one_f_one_b(request: PlanRequest) -> FakePlan:
    """With measured durations the period is theirs, so tests can tell a replan from the first."""
    slot = 1.0 if request.durations is None else sum(d.forward for d in request.durations)
    places = [WorkerId(r, s) for r in range(request.replicas) for s in range(request.stages)]
    return FakePlan(
        period=slot * request.microbatches,
        lower_bound=slot,
        actions={place: _row(place, request) for place in places},
    )


def _row(place: WorkerId, request: PlanRequest) -> tuple[Action, ...]:
    before = WorkerId(place.replica, place.stage - 1) if place.stage else None
    is_last = place.stage + 1 == request.stages
    behind = None if is_last else WorkerId(place.replica, place.stage + 1)
    num_warmup = min(request.stages - place.stage - 1, request.microbatches)
    order = [(Kind.FORWARD, i) for i in range(num_warmup)]
    for i in range(num_warmup, request.microbatches):
        order += [(Kind.FORWARD, i), *_backward(i - num_warmup)]
    for i in range(request.microbatches - num_warmup, request.microbatches):
        order += _backward(i)
    peers = {
        Kind.FORWARD: (before, behind),
        Kind.INPUT_GRADIENT: (behind, before),
        Kind.WEIGHT_GRADIENT: (None, None),
    }
    return tuple(
        Action(kind, place.stage, place.replica, i, place, *peers[kind], 0.0, 0.0)
        for kind, i in order
    )


def _backward(microbatch: int) -> list[tuple[Kind, int]]:
    return [(Kind.INPUT_GRADIENT, microbatch), (Kind.WEIGHT_GRADIENT, microbatch)]
