"""A planner for tests: plain 1F1B per replica; the first live worker of a stage stands in for the
lost ones, after its own micro-batches."""

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
    actions: dict[WorkerId, tuple[Action, ...]] = {
        place: () for place in places if place not in request.lost
    }
    for origin in sorted(places, key=lambda place: place in request.lost):
        actions[_worker_for(origin, request)] += _row(origin, request)
    return FakePlan(period=slot * request.microbatches, lower_bound=slot, actions=actions)


def _worker_for(origin: WorkerId, request: PlanRequest) -> WorkerId:
    if origin not in request.lost:
        return origin
    peers = (WorkerId(replica, origin.stage) for replica in range(request.replicas))
    return next(peer for peer in peers if peer not in request.lost)


def _row(origin: WorkerId, request: PlanRequest) -> tuple[Action, ...]:
    """The actions of the micro-batches of one replica at one stage."""
    worker = _worker_for(origin, request)
    before = _neighbour(origin, -1, request)
    behind = _neighbour(origin, +1, request)
    num_warmup = min(request.stages - origin.stage - 1, request.microbatches)
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
        Action(kind, origin.stage, origin.replica, i, worker, *peers[kind], 0.0, 0.0)
        for kind, i in order
    )


def _neighbour(origin: WorkerId, offset: int, request: PlanRequest) -> WorkerId | None:
    stage = origin.stage + offset
    if not 0 <= stage < request.stages:
        return None
    return _worker_for(WorkerId(origin.replica, stage), request)


def _backward(microbatch: int) -> list[tuple[Kind, int]]:
    return [(Kind.INPUT_GRADIENT, microbatch), (Kind.WEIGHT_GRADIENT, microbatch)]
