"""The checker: proves that a plan may run, by rules that know nothing of how it was made.

Returns every broken rule it finds, in words. No plan leaves the planner unless the list is empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain

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
    problems = list(_check_rows(plan))
    if problems:
        return problems
    places = _places(plan)
    problems = list(_check_each_once(plan, places))
    if problems:
        return problems
    columns = _columns(plan, places)
    problems = list(_check_peers(columns))
    problems = problems or [*_check_channels(plan), *_check_progress(plan, places)]
    return problems or [*_check_times(plan, columns), *_check_figures(plan)]


def _check_rows(plan: Plan) -> Iterator[str]:
    """Live workers of a stage are given actions of that stage."""
    problem = plan.problem
    replicas, microbatches = range(problem.replicas), range(problem.microbatches)
    for worker, row in plan.actions.items():
        if worker in problem.lost and row:
            yield f"lost worker {worker} is given {len(row)} actions"
        if worker.replica not in replicas or not 0 <= worker.stage < problem.stages:
            yield f"worker {worker} is outside the shape"
        for action in row:
            if action.replica not in replicas or action.microbatch not in microbatches:
                yield f"{action} is outside the shape"
            if action.worker != worker:
                yield f"{action} is listed under worker {worker}"
            if action.stage != worker.stage:
                yield f"{action} of stage {action.stage} is on a worker of stage {worker.stage}"


_Places = dict[WorkerId, list[int]]
"""A number for each action of each worker, in the order it runs them.

Numbers, because a plan has hundreds of thousands of actions. Those of a micro-batch come one after
the other: F, B and W of stage 0, then of stage 1, and so on.
"""


def _places(plan: Plan) -> _Places:
    microbatches, num_columns = plan.problem.microbatches, 3 * plan.problem.stages
    places: _Places = {}
    for worker, row in plan.actions.items():
        columns = {kind: 3 * worker.stage + number for kind, number in _KIND.items()}
        places[worker] = [
            (action.replica * microbatches + action.microbatch) * num_columns + columns[action.kind]
            for action in row
        ]
    return places


def _check_each_once(plan: Plan, places: _Places) -> Iterator[str]:
    """Every micro-batch runs F, B and W once per stage."""
    problem = plan.problem
    times = Counter(chain.from_iterable(places.values()))
    for place, number in times.items():
        if number > 1:
            yield f"{_name(problem, place)} is planned {number} times"
    expected = 3 * problem.stages * problem.num_jobs
    if len(times) < expected:
        first = next(place for place in range(expected) if place not in times)
        yield f"{expected - len(times)} actions are missing, first {_name(problem, first)}"


def _name(problem: Problem, place: int) -> str:
    where, kind = divmod(place, 3)
    job, stage = divmod(where, problem.stages)
    replica, microbatch = divmod(job, problem.microbatches)
    return f"{list(_KIND)[kind]}{replica}.{microbatch} on stage {stage}"


_Columns = list[list[Action]]
"""The actions of a plan, by kind on one stage (`stage * 3 + kind`) and then by micro-batch."""


def _columns(plan: Plan, places: _Places) -> _Columns:
    placed: dict[int, Action] = {}
    for worker, row in plan.actions.items():
        placed.update(zip(places[worker], row, strict=True))
    num_columns = 3 * plan.problem.stages
    return [
        [placed[place] for place in range(column, len(placed), num_columns)]
        for column in range(num_columns)
    ]


def _check_peers(columns: _Columns) -> Iterator[str]:
    """F, B and W of a micro-batch share a worker, and its neighbours in the route are its peers."""
    nobody = [None] * len(columns[0])
    routes = [[action.worker for action in column] for column in columns[::3]]
    around: list[Sequence[WorkerId | None]] = [nobody, *routes, nobody]
    for stage, workers in enumerate(routes):
        before, after = around[stage], around[stage + 2]
        expected = ((before, after), (after, before), (nobody, nobody))
        for column, ends in zip(columns[stage * 3 : stage * 3 + 3], expected, strict=True):
            for action, worker, source, target in zip(column, workers, *ends, strict=True):
                if action.worker != worker:
                    yield f"{action} is not where its activations are, on {worker}"
                if action.receives_from != source or action.sends_to != target:
                    yield (
                        f"{action} talks to {action.receives_from} and {action.sends_to}"
                        f" instead of {source} and {target}"
                    )


def _check_channels(plan: Plan) -> Iterator[str]:
    """Both ends of a channel agree on its order."""
    sent: dict[Channel, list[Action]] = {}
    received: dict[Channel, list[Action]] = {}
    for worker, row in plan.actions.items():
        for receiver, passing in _by_peer(row, [action.sends_to for action in row]).items():
            sent[Channel(worker, receiver, passing[0].kind)] = passing
        for sender, passing in _by_peer(row, [action.receives_from for action in row]).items():
            received[Channel(sender, worker, passing[0].kind)] = passing
    for end, orders in (("sender", sent), ("receiver", received)):
        for channel in {**orders, **plan.channels}:
            order = [(action.replica, action.microbatch) for action in orders.get(channel, ())]
            planned = list(plan.channels.get(channel, ()))
            if order != planned:
                yield (
                    f"channel {channel.sender} -> {channel.receiver} ({channel.kind}): the {end}'s"
                    f" order {_brief(order)} is not the planned {_brief(planned)}"
                )


def _by_peer(row: tuple[Action, ...], peers: list[WorkerId | None]) -> dict[WorkerId, list[Action]]:
    """A worker's actions by whom they talk to. With one peer they are of one kind: it is on the
    stage before or on the one after."""
    passing: dict[WorkerId, list[Action]] = defaultdict(list)
    for action, peer in zip(row, peers, strict=True):
        if peer is not None:
            passing[peer].append(action)
    return passing


def _brief(order: list[tuple[int, int]]) -> str:
    shown = " ".join(f"{replica}.{microbatch}" for replica, microbatch in order[:6])
    return f"[{shown}{' ...' if len(order) > 6 else ''}]"


def _needs(problem: Problem) -> list[list[int]]:
    """For each column, those that must be over before it can start, micro-batch by micro-batch."""
    needs: list[list[int]] = []
    for forward in range(0, 3 * problem.stages, 3):
        gradient, weight = forward + 1, forward + 2
        before = [forward - 3] if forward else []
        # Glued, the gradient leaves the later stage when its W is over, too.
        later = [weight + 3 if problem.variant.is_glued else gradient + 3]
        is_last = weight + 1 == 3 * problem.stages
        needs += [before, [forward] if is_last else [forward, *later], [gradient]]
    return needs


def _check_progress(plan: Plan, places: _Places) -> Iterator[str]:
    """Runs the lists without a clock: a worker whose next action can never start is stuck."""
    offsets = [
        [needed - column for needed in columns]
        for column, columns in enumerate(_needs(plan.problem))
    ]
    is_done = bytearray(len(offsets) * plan.problem.num_jobs)
    todo = {worker: row[::-1] for worker, row in places.items()}
    waiting_for: dict[int, list[WorkerId]] = defaultdict(list)
    runnable = deque(todo)
    while runnable:
        worker = runnable.popleft()
        row = todo[worker]
        while row:
            place = row[-1]
            missing = _missing(is_done, place, offsets[place % len(offsets)])
            if missing is not None:
                waiting_for[missing].append(worker)
                break
            is_done[row.pop()] = True
            if place in waiting_for:
                runnable.extend(waiting_for.pop(place))
    for worker, row in todo.items():
        if row:
            yield f"worker {worker} waits for ever before {plan.actions[worker][-len(row)]}"


def _missing(is_done: bytearray, place: int, offsets: list[int]) -> int | None:
    for offset in offsets:
        if not is_done[place + offset]:
            return place + offset
    return None


def _check_times(plan: Plan, columns: _Columns) -> Iterator[str]:
    """Durations are as given, nothing overlaps on a worker, nothing starts before what it needs."""
    slack = _TOLERANCE * plan.makespan
    # The planner's ticks round measured durations to a millionth of the longest one.
    rounding = slack + 1e-6 * plan.problem.durations.longest
    if plan.problem.variant.is_glued:
        yield from _check_glue(plan)
    yield from _check_overlaps(plan, slack)
    yield from _check_lengths(plan, columns, rounding)
    yield from _check_arrivals(plan, columns, rounding)


def _check_overlaps(plan: Plan, slack: float) -> Iterator[str]:
    for worker, row in plan.actions.items():
        free_at = 0.0
        for action in row:
            if action.start < free_at - slack:
                yield f"{action} starts at {action.start:g}, before {worker} is free at {free_at:g}"
            free_at = action.end


def _check_lengths(plan: Plan, columns: _Columns, rounding: float) -> Iterator[str]:
    for stage, durations in enumerate(plan.problem.durations.stages):
        lengths = (durations.forward, durations.input_gradient, durations.weight_gradient)
        for column, length in zip(columns[stage * 3 : stage * 3 + 3], lengths, strict=True):
            for action in column:
                if abs(action.end - action.start - length) > rounding:
                    yield f"{action} takes {action.end - action.start:g}, not {length:g}"


def _check_arrivals(plan: Plan, columns: _Columns, rounding: float) -> Iterator[str]:
    for column, needs in enumerate(_needs(plan.problem)):
        for needed in needs:
            # F, B and W of a stage are on one worker, those of two stages never.
            transfer = plan.problem.durations.transfer if needed // 3 != column // 3 else 0.0
            for action, earlier in zip(columns[column], columns[needed], strict=True):
                if action.start < earlier.end + transfer - rounding:
                    yield (
                        f"{action} starts at {action.start:g}, before {earlier} has arrived at"
                        f" {earlier.end + transfer:g}"
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
