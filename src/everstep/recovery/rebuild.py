"""Decides what is logged, and how stages that nobody holds are replayed from it. Pure.

Loading the checkpoint of everybody is the other way. It runs the lost steps again at the pace of
the pipeline, bubbles and all; a replay runs them at the pace of those who share it, without. So the
replay is taken unless its range is so large, and those who share it so few, that it takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from everstep.core.ids import WorkerId
from everstep.membership.facts import LogDirection, LogSource, Replay
from everstep.membership.rebuilding import LogChoice, LogRequest, NoReplay, ReplayRequest
from everstep.recovery.coverage import ReplayRange, choose_range, describe_gaps, senders
from everstep.recovery.grouping import Boundary, Costs, StageCost, choose_groups


def plan_replay(request: ReplayRequest) -> tuple[Replay, ...] | NoReplay:
    needs = {
        "num_stages": request.shape.stages,
        "num_microbatches": _num_microbatches(request),
        "first_step": request.checkpoint + 1,
        "last_step": request.last_step,
    }
    ranges = choose_range(request.lost_stages, request.holdings, **needs)
    if ranges is None:
        return NoReplay(describe_gaps(request.lost_stages, request.holdings, **needs))
    replays = tuple(_replay(request, each) for each in ranges)
    return _too_slow(request, replays) or replays


def choose_logs(request: LogRequest) -> LogChoice:
    """Which boundaries the budget is best spent on."""
    stages = [
        StageCost(
            replay_s=request.num_microbatches
            * (stage.forward + stage.input_gradient + stage.weight_gradient),
            update_s=stage.optimizer,
        )
        for stage in request.stages
    ]
    boundaries = [
        Boundary(forward_bytes=before.sent_forward, backward_bytes=after.sent_backward)
        for before, after in pairwise(request.stages)
    ]
    costs = Costs(
        stages=tuple(stages),
        boundaries=tuple(boundaries),
        microbatches=request.num_microbatches,
        interval_steps=request.interval_steps,
        workers=request.num_workers,
        helpers=request.log.helpers,
    )
    grouping = choose_groups(costs, request.log.budget_bytes)
    return LogChoice(
        unlogged=tuple(b for b in range(len(boundaries)) if b not in grouping.logged),
        bytes=grouping.bytes,
        expected_s=grouping.expected_s,
    )


def _replay(request: ReplayRequest, stages: ReplayRange) -> Replay:
    span = range(stages.first_stage, stages.last_stage + 1)
    new = tuple(place for place in sorted(request.new) if place.stage in span)
    replayers = (*new, *_helpers(request, stages, num_new=len(new)))
    sources = _sources(request, stages)
    return Replay(
        first_stage=stages.first_stage,
        last_stage=stages.last_stage,
        checkpoint=request.checkpoint,
        last_step=request.last_step,
        replayers=replayers,
        rebuilt=new,
        is_shared=_is_shared(request, num_replayers=len(replayers)),
        sources=sources,
        scales_from=_who_knows_scales(request, sources),
    )


def _is_shared(request: ReplayRequest, *, num_replayers: int) -> bool:
    """Not among more than there are micro-batches: each must have one to bring a gradient."""
    return request.helpers != 0 and 1 < num_replayers <= _num_microbatches(request)


def _who_knows_scales(request: ReplayRequest, sources: Sequence[LogSource]) -> WorkerId:
    """Whoever logged the first step has seen them all; one that copied its state since has not."""
    first = [source for source in sources if source.first_step == request.checkpoint + 1]
    return first[0].holders[0] if first else min(request.holdings)


def _helpers(request: ReplayRequest, stages: ReplayRange, *, num_new: int) -> tuple[WorkerId, ...]:
    """Survivors, all of which wait anyway; no more than there are micro-batches to share.

    Neighbours last: they are busy giving what they have logged.
    """
    most = _num_microbatches(request) - num_new
    if request.helpers is not None:
        most = min(most, request.helpers)
    neighbours = (stages.first_stage - 1, stages.last_stage + 1)
    willing = sorted(request.holdings, key=lambda place: (place.stage in neighbours, place))
    return tuple(willing[: max(0, most)])


def _sources(request: ReplayRequest, stages: ReplayRange) -> tuple[LogSource, ...]:
    ends = (
        (stages.first_stage - 1, LogDirection.FORWARD),
        (stages.last_stage, LogDirection.BACKWARD),
    )
    return tuple(
        LogSource(
            boundary=boundary,
            direction=direction,
            first_step=supply.first_step,
            last_step=supply.last_step,
            attempt=supply.attempt,
            holders=tuple(supply.holders[number] for number in sorted(supply.holders)),
        )
        for boundary, direction in ends
        for supply in senders(
            request.holdings,
            boundary=boundary,
            direction=direction,
            first_step=request.checkpoint + 1,
            last_step=request.last_step,
            num_microbatches=_num_microbatches(request),
        )
    )


def _too_slow(request: ReplayRequest, replays: tuple[Replay, ...]) -> NoReplay | None:
    if request.durations is None or request.period_s is None:
        return None
    replay_s = sum(_step_s(request, replay) for replay in replays)
    if replay_s <= request.period_s:
        return None
    stages = sum(replay.last_stage - replay.first_stage + 1 for replay in replays)
    return NoReplay(
        f"replaying {stages} stages would take {replay_s:.3g} s for each step, and all stages"
        f" together take {request.period_s:.3g} s"
    )


def _step_s(request: ReplayRequest, replay: Replay) -> float:
    assert request.durations is not None
    span = request.durations[replay.first_stage : replay.last_stage + 1]
    one_s = sum(each.forward + each.input_gradient + each.weight_gradient for each in span)
    num_sharing = len(replay.replayers) if replay.is_shared else 1
    num_rounds = math.ceil(_num_microbatches(request) / num_sharing)
    return num_rounds * one_s + sum(each.optimizer for each in span)


def _num_microbatches(request: ReplayRequest) -> int:
    """Of a whole step."""
    return request.shape.replicas * request.microbatches
