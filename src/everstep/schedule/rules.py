"""The rules that the improver tries: one of them reaches the bound, or nearly, in most cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from everstep.schedule.greedy import B_FIRST, F_FIRST, Priorities, priorities
from everstep.schedule.routing import Routes
from everstep.schedule.workload import Workload


def rules_for_losses(work: Workload, routes: Routes) -> Iterator[Priorities]:
    """When there are few micro-batches and many losses, a delay on one stage adds to that on the
    next. Which of an adopter's micro-batches can best wait differs from case to case."""
    if all(live == work.replicas for live in work.num_live):
        return
    for yielding, leads in product((0.0, -1.0, 0.5, -0.5, 1.0), _leads_for_losses(work)):
        yield priorities(work, leads=leads, routes=routes, yielding=yielding)


def drawn_rule(work: Workload, routes: Routes, rng: random.Random) -> Priorities:
    """One more of that kind."""
    leads = rng.choice(_leads_for_losses(work))
    return priorities(work, leads=leads, routes=routes, yielding=rng.uniform(-1.0, 1.0))


def _leads_for_losses(work: Workload) -> list[list[float]]:
    return [
        [B_FIRST] * work.stages,
        [1.0] * work.stages,
        [0.5 * (work.stages - stage) for stage in range(work.stages)],
    ]


def rules_for_memory(work: Workload) -> Iterator[Priorities]:
    """When memory is tight the early stages, whose micro-batches take longest to come back, must
    not let a B delay their next F. When losses make a stage the bottleneck, its last F must not
    wait for all the Bs before it, nor its first B for all the Fs.
    """
    stages = work.stages
    leads = [
        [F_FIRST] * num_early + [B_FIRST] * (stages - num_early) for num_early in range(stages + 1)
    ]
    leads += [[lead] * stages for lead in (0.0, 1.0, 2.0, 4.0)]
    leads += [[slope * (stages - stage) for stage in range(stages)] for slope in (0.5, 0.75, 1.0)]
    for lead in leads:
        yield priorities(work, leads=lead)
