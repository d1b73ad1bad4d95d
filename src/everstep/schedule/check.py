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
    problems = problems or [*_check_channels(plan, places), *_check_times(plan, columns)]
    if not problems and not _do_times_rise(plan):
        problems = list(_check_progress(plan, places))
    return problems or list(_check_figures(plan))


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


def _check_channels(plan: Plan, places: _Places) -> Iterator[str]:
    """Both ends of a channel agree on its order."""
    problem = plan.problem
    microbatches = [divmod(job, problem.microbatches) for job in range(problem.num_jobs)]
    position = {place: at for row in places.values() for at, place in enumerate(row)}
    sent = _sent(plan, places)
    for channel in {**sent, **plan.channels}:
        passing = sent.get(channel, [])
        planned = list(plan.channels.get(channel, ()))
        received = _as_received(passing, channel, position)
        for end, order in (("sender", passing), ("receiver", received)):
            found = [microbatches[place // (3 * problem.stages)] for place in order]
            if found != planned:
                yield (
                    f"channel {channel.sender} -> {channel.receiver} ({channel.kind}): the {end}'s"
                    f" order {_brief(found)} is not the planned {_brief(planned)}"
                )


def _sent(plan: Plan, places: _Places) -> dict[Channel, list[int]]:
    """The places of what enters every channel, in the sender's order."""
    sent = {}
    for worker, row in plan.actions.items():
        passing: dict[WorkerId, list[int]] = defaultdict(list)
        for action, place in zip(row, places[worker], strict=True):
            if action.sends_to is not None:
                passing[action.sends_to].append(place)
        for receiver, order in passing.items():
            # A receiver is on the next stage and gets F, or on the one before and gets B.
            kind = Kind.FORWARD if receiver.stage > worker.stage else Kind.INPUT_GRADIENT
            sent[Channel(worker, receiver, kind)] = order
    return sent


def _as_received(passing: list[int], channel: Channel, position: dict[int, int]) -> list[int]:
    """The same in the order in which the receiver runs what it is sent."""
    to_receiver = 3 if channel.kind is Kind.FORWARD else -3
    return sorted(passing, key=lambda place: position[place + to_receiver])


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


def _do_times_rise(plan: Plan) -> bool:
    """Whether all actions take time, more than what the checks of times let pass. Then what waits
    for another action starts later, nothing waits for itself, and no worker is ever stuck."""
    return min(_lengths(plan.problem)) > 2 * _rounding(plan)


def _check_progress(plan: Plan, places: _Places) -> Iterator[str]:
    """Runs the lists without a clock: a worker whose next action can never start is stuck. Times
    do not tell, where an action that takes none may start together with what waits for it."""
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
    if plan.problem.variant.is_glued:
        yield from _check_glue(plan)
    yield from _check_overlaps(plan)
    yield from _check_lengths(plan, columns)
    yield from _check_arrivals(plan, columns)


def _slack(plan: Plan) -> float:
    return _TOLERANCE * plan.makespan


def _rounding(plan: Plan) -> float:
    """The planner's ticks round measured durations to a millionth of the longest one."""
    return _slack(plan) + 1e-6 * plan.problem.durations.longest


def _check_overlaps(plan: Plan) -> Iterator[str]:
    slack = _slack(plan)
    for worker, row in plan.actions.items():
        free_at = 0.0
        for action in row:
            if action.start < free_at - slack:
                yield f"{action} starts at {action.start:g}, before {worker} is free at {free_at:g}"
            free_at = action.end


def _lengths(problem: Problem) -> list[float]:
    """By column."""
    return [
        length
        for stage in problem.durations.stages
        for length in (stage.forward, stage.input_gradient, stage.weight_gradient)
    ]


def _check_lengths(plan: Plan, columns: _Columns) -> Iterator[str]:
    rounding = _rounding(plan)
    for column, length in zip(columns, _lengths(plan.problem), strict=True):
        for action in column:
            # Asked this way round, because a time that is not a number is never more than another.
            if not abs(action.end - action.start - length) <= rounding:
                yield f"{action} takes {action.end - action.start:g}, not {length:g}"


def _check_arrivals(plan: Plan, columns: _Columns) -> Iterator[str]:
    rounding = _rounding(plan)
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
