"""The checker: proves that a plan may run, by rules that know nothing of how it was made.

Returns every broken rule it finds, in words. No plan leaves the planner unless the list is empty.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import count

from everstep.core.errors import PlanInvalid
from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind
from everstep.schedule.plan import Channel, Plan, peak_in_flight
from everstep.schedule.problem import Problem

_KIND = {Kind.FORWARD: 0, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 2}

_TOLERANCE = 1e-9
"""Relative to the makespan: planned times are sums of floats."""


def require_valid(plan: Plan) -> Plan:
    problems = check(plan)
    if problems:
        raise PlanInvalid(problems)
    return plan


def check(plan: Plan) -> list[str]:
    """Every rule the plan breaks. The later rules look things up that the first ones establish."""
    problems = list(_check_each_once(plan))
    if problems:
        return problems
    actions, needs = _by_place(plan)
    problems = list(_check_peers(plan, actions)) or list(_check_orders(plan, needs))
    return problems or [*_check_times(plan, actions, needs), *_check_figures(plan)]


def _place(problem: Problem, action: Action) -> int:
    """A number for each F, B and W of each micro-batch on each stage: there is one action of each.

    Numbers, because a plan has hundreds of thousands: F of the stage before is at place - 3, what
    B follows, and what W follows, on the same stage at place - 1.
    """
    job = action.replica * problem.microbatches + action.microbatch
    return (job * problem.stages + action.stage) * 3 + _KIND[action.kind]


_Needs = dict[WorkerId, list[tuple[int, tuple[int, ...]]]]
"""Per worker, for each of its actions in order: its place, and the places of what it needs."""


def _by_place(plan: Plan) -> tuple[list[Action], _Needs]:
    placed: dict[int, Action] = {}
    needs: _Needs = {}
    for worker, row in plan.actions.items():
        places = [_place(plan.problem, action) for action in row]
        placed.update(zip(places, row, strict=True))
        needs[worker] = [
            (place, _needs(plan, action, place)) for place, action in zip(places, row, strict=True)
        ]
    return [placed[place] for place in range(len(placed))], needs


def _check_each_once(plan: Plan) -> Iterator[str]:
    """Every micro-batch runs F, B and W once per stage, on one live worker of that stage."""
    problem = plan.problem
    seen: set[int] = set()
    for worker, row in plan.actions.items():
        if worker in problem.lost and row:
            yield f"lost worker {worker} is given {len(row)} actions"
        for action in row:
            if not _is_inside(problem, action):
                yield f"{action} is outside the shape"
                continue
            place = _place(problem, action)
            if place in seen:
                yield f"{action} is planned twice"
            seen.add(place)
            if action.worker != worker:
                yield f"{action} is listed under worker {worker}"
            if action.stage != worker.stage:
                yield f"{action} of stage {action.stage} is on a worker of stage {worker.stage}"
    expected = 3 * problem.stages * problem.replicas * problem.microbatches
    if len(seen) < expected:
        yield f"{expected - len(seen)} actions are missing, first {_first_missing(problem, seen)}"


def _is_inside(problem: Problem, action: Action) -> bool:
    return (
        0 <= action.stage < problem.stages
        and 0 <= action.replica < problem.replicas
        and 0 <= action.microbatch < problem.microbatches
        and 0 <= action.worker.replica < problem.replicas
    )


def _first_missing(problem: Problem, seen: set[int]) -> str:
    first = next(place for place in count() if place not in seen)
    where, kind = divmod(first, 3)
    job, stage = divmod(where, problem.stages)
    replica, microbatch = divmod(job, problem.microbatches)
    return f"{list(_KIND)[kind]}{replica}.{microbatch} on stage {stage}"


def _check_peers(plan: Plan, actions: list[Action]) -> Iterator[str]:
    """F, B and W of a micro-batch share a worker, and its neighbours in the route are its peers."""
    last = plan.problem.stages - 1
    for place, action in enumerate(actions):
        kind, forward = action.kind, actions[place - place % 3]
        if action.worker != forward.worker:
            yield f"{action} is not where its activations are, on {forward.worker}"
        before = actions[place - 3].worker if action.stage else None
        after = actions[place + 3].worker if action.stage < last else None
        expected: tuple[WorkerId | None, WorkerId | None] = (None, None)
        if kind is Kind.FORWARD:
            expected = (before, after)
        elif kind is Kind.INPUT_GRADIENT:
            expected = (after, before)
        if (action.receives_from, action.sends_to) != expected:
            yield (
                f"{action} talks to {action.receives_from} and {action.sends_to}"
                f" instead of {expected[0]} and {expected[1]}"
            )


def _check_orders(plan: Plan, needs: _Needs) -> Iterator[str]:
    """Both ends of a channel agree on its order, and running the lists never gets stuck."""
    sent: dict[tuple[WorkerId, WorkerId, Kind], list[tuple[int, int]]] = defaultdict(list)
    received: dict[tuple[WorkerId, WorkerId, Kind], list[tuple[int, int]]] = defaultdict(list)
    for worker, row in plan.actions.items():
        for action in row:
            what = (action.replica, action.microbatch)
            if action.sends_to is not None:
                sent[worker, action.sends_to, action.kind].append(what)
            if action.receives_from is not None:
                received[action.receives_from, worker, action.kind].append(what)
    for key in sorted(sent.keys() | received.keys() | plan.channels.keys()):
        channel = Channel(*key)
        planned = list(plan.channels.get(channel, ()))
        for end, order in (("sender", sent[channel]), ("receiver", received[channel])):
            if order != planned:
                yield (
                    f"channel {channel.sender} -> {channel.receiver} ({channel.kind}): the {end}'s"
                    f" order {_brief(order)} is not the planned {_brief(planned)}"
                )
    yield from _check_progress(plan, needs)


def _brief(order: list[tuple[int, int]]) -> str:
    shown = " ".join(f"{replica}.{microbatch}" for replica, microbatch in order[:6])
    return f"[{shown}{' ...' if len(order) > 6 else ''}]"


def _needs(plan: Plan, action: Action, place: int) -> tuple[int, ...]:
    """What must be over before the action can start, besides the worker's earlier actions."""
    if action.kind is Kind.FORWARD:
        return (place - 3,) if action.stage else ()
    if action.kind is Kind.WEIGHT_GRADIENT or action.stage == plan.problem.stages - 1:
        return (place - 1,)
    # Glued, the gradient leaves the later stage when its W is over, too.
    return place - 1, place + (4 if plan.problem.variant.is_glued else 3)


def _check_progress(plan: Plan, needs: _Needs) -> Iterator[str]:
    """Runs the lists without a clock: a worker whose next action can never start is stuck."""
    done: set[int] = set()
    position = dict.fromkeys(plan.actions, 0)
    waiting_for: dict[int, list[WorkerId]] = defaultdict(list)
    runnable = deque(plan.actions)
    while runnable:
        worker = runnable.popleft()
        places = needs[worker]
        while position[worker] < len(places):
            place, needed = places[position[worker]]
            if not done.issuperset(needed):
                missing = next(each for each in needed if each not in done)
                waiting_for[missing].append(worker)
                break
            done.add(place)
            position[worker] += 1
            if place in waiting_for:
                runnable.extend(waiting_for.pop(place))
    for worker, row in plan.actions.items():
        if position[worker] < len(row):
            yield f"worker {worker} waits for ever before {row[position[worker]]}"


def _check_times(plan: Plan, actions: list[Action], needs: _Needs) -> Iterator[str]:
    """Durations are as given, nothing overlaps on a worker, nothing starts before what it needs."""
    durations = plan.problem.durations
    slack = _TOLERANCE * plan.makespan
    # The planner's ticks round measured durations to a millionth of the longest one.
    rounding = slack + 1e-6 * durations.longest
    if plan.problem.variant.is_glued:
        yield from _check_glue(plan)
    for worker, row in plan.actions.items():
        stage = durations.stages[worker.stage]
        lengths = {
            Kind.FORWARD: stage.forward,
            Kind.INPUT_GRADIENT: stage.input_gradient,
            Kind.WEIGHT_GRADIENT: stage.weight_gradient,
        }
        free_at = 0.0
        for action, (_, places) in zip(row, needs[worker], strict=True):
            if abs(action.end - action.start - lengths[action.kind]) > rounding:
                yield f"{action} takes {action.end - action.start:g}, not {lengths[action.kind]:g}"
            if action.start < free_at - slack:
                yield f"{action} starts at {action.start:g}, before {worker} is free at {free_at:g}"
            free_at = action.end
            for place in places:
                needed = actions[place]
                transfer = durations.transfer if needed.worker != worker else 0.0
                if action.start < needed.end + transfer - rounding:
                    yield (
                        f"{action} starts at {action.start:g}, before {needed} has arrived at"
                        f" {needed.end + transfer:g}"
                    )


def _check_glue(plan: Plan) -> Iterator[str]:
    for row in plan.actions.values():
        for action, following in zip(row, [*row[1:], None], strict=True):
            if action.kind is Kind.INPUT_GRADIENT and (
                following is None
                or following.kind is not Kind.WEIGHT_GRADIENT
                or (following.replica, following.microbatch) != (action.replica, action.microbatch)
            ):
                yield f"{action} is not followed by its W, though the plan is glued"


def _check_figures(plan: Plan) -> Iterator[str]:
    """What the plan says about itself is so: in-flight peaks, makespan, period, bound."""
    problem = plan.problem
    peaks = peak_in_flight(problem, plan.actions)
    if tuple(peaks) != plan.peak_in_flight:
        yield f"peak in flight is {peaks}, the plan says {list(plan.peak_in_flight)}"
    for stage, peak in enumerate(peaks):
        limit = problem.limit(stage)
        if limit is not None and peak > limit:
            yield f"stage {stage} holds {peak} micro-batches in flight (limit {limit})"
    firsts = [float("inf")] * problem.stages
    lasts = [0.0] * problem.stages
    for worker, row in plan.actions.items():
        if row:
            firsts[worker.stage] = min(firsts[worker.stage], row[0].start)
            lasts[worker.stage] = max(lasts[worker.stage], row[-1].end)
    ends = [last + problem.durations.synchronization for last in lasts]
    spans = [end - first for end, first in zip(ends, firsts, strict=True)]
    period = max(spans) if problem.variant.is_staggered else max(ends)
    tolerance = 1e-5 * max(ends)
    if abs(max(ends) - plan.makespan) > tolerance:
        yield f"makespan is {max(ends):g}, the plan says {plan.makespan:g}"
    if abs(period - plan.period) > tolerance:
        yield f"period is {period:g}, the plan says {plan.period:g}"
    if plan.lower_bound > plan.period + tolerance:
        yield f"period {plan.period:g} is below its lower bound {plan.lower_bound:g}"
