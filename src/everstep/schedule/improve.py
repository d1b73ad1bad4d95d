"""The improver: a better timetable within a time budget, for when memory is tight or losses many.

First a handful of rules for how far F may run ahead of B on each stage, and for whose micro-batches
an adopter takes first; one of them reaches the bound, or nearly, in most cases. Then a search over
priorities and routes, by small changes and, with several losses, by new draws. Never returns a
worse timetable than it was given, and stops as soon as the bound is reached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain, product

from everstep.core.clock import Clock
from everstep.schedule.greedy import B_FIRST, F_FIRST, Priorities, list_schedule, priorities
from everstep.schedule.routing import Routes
from everstep.schedule.workload import B, Score, Timetable, Workload, score, stage_windows

DrawRoutes = Callable[[random.Random], Routes]

DRAWN_SHARE = 0.8
"""Of the search, with several losses: small changes seldom help where delays add up."""


def improve(
    work: Workload,
    given: Timetable,
    *,
    target: int,
    budget_s: float,
    clock: Clock,
    draw_routes: DrawRoutes | None = None,
    seed: int = 0,
) -> Timetable:
    """Searches until a period of `target` ticks is found or the budget is spent."""
    deadline_s = clock.now_s() + budget_s
    search = _Search(work, given, random.Random(seed), draw_routes)
    for priority in chain(_rules_for_losses(work, given.routes), _rules_for_memory(work)):
        if search.best.period <= target or clock.now_s() >= deadline_s:
            return search.table
        search.offer(given.routes, priority)
    while search.best.period > target and clock.now_s() < deadline_s:
        search.step()
    return search.table


def _rules_for_losses(work: Workload, routes: Routes) -> Iterator[Priorities]:
    """When there are few micro-batches and many losses, a delay on one stage adds to that on the
    next. Which of an adopter's micro-batches can best wait differs from case to case."""
    if all(live == work.replicas for live in work.num_live):
        return
    for yielding, leads in product((0.0, -1.0, 0.5, -0.5, 1.0), _leads_for_losses(work)):
        yield priorities(work, leads=leads, routes=routes, yielding=yielding)


def _leads_for_losses(work: Workload) -> list[list[float]]:
    return [
        [B_FIRST] * work.stages,
        [1.0] * work.stages,
        [0.5 * (work.stages - stage) for stage in range(work.stages)],
    ]


def _rules_for_memory(work: Workload) -> Iterator[Priorities]:
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


class _Search:
    """Random changes to the best priorities so far; equal scores are accepted, too."""

    def __init__(
        self,
        work: Workload,
        given: Timetable,
        rng: random.Random,
        draw_routes: DrawRoutes | None,
    ) -> None:
        self.draw_routes = draw_routes
        self.work = work
        self.rng = rng
        self.table = given
        self.best: Score = score(work, given.starts)
        # Its priorities are not known: the walk starts at the first offer.
        self.here: Score | None = None
        self.routes: Routes = given.routes
        self.priority: Priorities = []
        self.starts: list[int] = given.starts
        self.movable = [
            stage for stage in range(work.stages) if work.num_live[stage] < work.replicas
        ]

    def offer(self, routes: Routes, priority: Priorities) -> None:
        table = list_schedule(self.work, routes, priority)
        found = score(self.work, table.starts)
        if self.here is None or found <= self.here:
            self.here, self.routes, self.priority = found, routes, priority
            self.starts = table.starts
        if found < self.best:
            self.best, self.table = found, table

    def step(self) -> None:
        if self.draw_routes is not None and self.rng.random() < DRAWN_SHARE:
            self._draw(self.draw_routes)
            return
        changes = [self._nudge_some, self._nudge_stage, self._nudge_job, self._hurry_last]
        if self.movable:
            changes.append(self._swap_routes)
        self.rng.choice(changes)()

    def _draw(self, draw_routes: DrawRoutes) -> None:
        """Other routes, and a rule for them."""
        routes = draw_routes(self.rng)
        leads = self.rng.choice(_leads_for_losses(self.work))
        yielding = self.rng.uniform(-1.0, 1.0)
        self.offer(routes, priorities(self.work, leads=leads, routes=routes, yielding=yielding))

    def _nudge_some(self) -> None:
        """A few operations become more or less urgent."""
        priority = self.priority[:]
        for _ in range(self.rng.choice((1, 2, 3, 6))):
            scale = self.rng.choice((2.0, 0.3 * self.work.num_jobs, float(self.work.num_jobs)))
            priority[self.rng.randrange(len(priority))] += self.rng.gauss(0, scale)
        self.offer(self.routes, priority)

    def _nudge_stage(self) -> None:
        """One kind of action on one stage changes its rank, from some micro-batch on."""
        work, rng = self.work, self.rng
        priority = self.priority[:]
        stage, kind = rng.randrange(work.stages), rng.randrange(3)
        since, amount = rng.randrange(work.microbatches), rng.gauss(0, 0.5 * work.num_jobs)
        only = rng.randrange(-1, work.replicas)
        for job in range(work.num_jobs):
            if job % work.microbatches >= since and only in (-1, self.routes[stage][job]):
                priority[(job * work.stages + stage) * 3 + kind] += amount
        self.offer(self.routes, priority)

    def _nudge_job(self) -> None:
        """One micro-batch becomes more or less urgent everywhere."""
        size = self.work.stages * 3
        priority = self.priority[:]
        first = self.rng.randrange(self.work.num_jobs) * size
        amount = self.rng.gauss(0, 0.3 * self.work.num_jobs)
        priority[first : first + size] = [
            value + amount for value in priority[first : first + size]
        ]
        self.offer(self.routes, priority)

    def _hurry_last(self) -> None:
        """The micro-batches that end the widest window last become more urgent everywhere."""
        work, rng = self.work, self.rng
        windows = stage_windows(work, self.starts)
        spans = [end - (first if work.is_staggered else 0) for first, end in windows]
        critical = spans.index(max(spans))
        ends = self.starts[critical * 3 + B :: work.stages * 3]
        latest = sorted(range(work.num_jobs), key=ends.__getitem__)[-rng.choice((1, 2, 4, 8)) :]
        priority = self.priority[:]
        amount = abs(rng.gauss(0, 0.2 * work.num_jobs))
        since = rng.randrange(work.stages)
        for job in latest:
            first = (job * work.stages + since) * 3
            last = (job + 1) * work.stages * 3
            priority[first:last] = [value - amount for value in priority[first:last]]
        self.offer(self.routes, priority)

    def _swap_routes(self) -> None:
        """Two adopted micro-batches change places, so the load stays balanced."""
        stage = self.rng.choice(self.movable)
        row = self.routes[stage][:]
        adopted = [j for j, adopter in enumerate(row) if adopter != j // self.work.microbatches]
        one, other = self.rng.choice(adopted), self.rng.choice(adopted)
        row[one], row[other] = row[other], row[one]
        self.offer([*self.routes[:stage], row, *self.routes[stage + 1 :]], self.priority)
