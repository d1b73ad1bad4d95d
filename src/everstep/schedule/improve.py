"""The improver: a better timetable within a time budget, for when memory is tight or losses many.

It tries a handful of rules and, in turns with them, walks on from the best of what it has seen.
Never returns a worse timetable than it was given, and stops as soon as the bound is reached.
"""

from __future__ import annotations

import random
from itertools import chain, count

from everstep.core.clock import Clock
from everstep.schedule.rules import rules_for_losses, rules_for_memory
from everstep.schedule.walk import DrawRoutes, Walk
from everstep.schedule.workload import Timetable, Workload


def improve(
    work: Workload,
    given: Timetable,
    *,
    target: int,
    budget_s: float,
    clock: Clock,
    insist_s: float = 0.0,
    near: int = 0,
    draw_routes: DrawRoutes | None = None,
    seed: int = 0,
) -> Timetable:
    """Searches until a period of `target` ticks is found or the budget is spent.

    Args:
        insist_s: the budget as long as the period is above `near`, if it is the larger one.
    """
    begin_s = clock.now_s()
    walk = Walk(work, given, random.Random(seed), target=target, draw_routes=draw_routes)
    rules = chain(rules_for_losses(work, given.routes), rules_for_memory(work))
    for turn in count():
        limit_s = budget_s if walk.best.period <= near else max(budget_s, insist_s)
        if walk.best.period <= target or clock.now_s() - begin_s >= limit_s:
            break
        rule = next(rules, None) if turn % 2 == 0 else None
        if rule is not None:
            walk.offer(given.routes, rule)
        else:
            walk.step()
    return walk.table
