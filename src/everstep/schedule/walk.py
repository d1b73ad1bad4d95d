"""A walk over priorities and routes, towards a shorter period.

It aims at a goal, looks which workers are late for it, and hurries what they waited for; now and
then it changes something at random. Invariant: until it starts anew it is never later for its goal
than it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from everstep.schedule.greedy import Priorities, list_schedule
from everstep.schedule.late import (
    Delay,
    after_idling,
    delays,
    jobs_of,
    late_workers,
    lateness,
)
from everstep.schedule.routing import Routes
from everstep.schedule.rules import drawn_rule
from everstep.schedule.workload import B, F, Score, Timetable, W, Workload, score

DrawRoutes = Callable[[random.Random], Routes]

DRAWN_SHARE = 0.15
"""Of the steps, with several losses: a lucky draw of routes is a better place to walk on from."""

STUCK_OFFERS = 100
"""So many that brought it no nearer, and the walk starts anew from the next draw. Most walks that
arrive at all have taken fewer steps than that."""


class Walk:
    """The goal is below the best period so far, half-way to the target: so near that few workers
    are late for it, and yet no crawl where ticks are fine."""

    def __init__(
        self,
        work: Workload,
        given: Timetable,
        rng: random.Random,
        *,
        target: int,
        draw_routes: DrawRoutes | None = None,
    ) -> None:
        self.work = work
        self.rng = rng
        self.target = target
        self.draw_routes = draw_routes
        self.table = given
        self.best: Score = score(work, given.starts)
        self.goal = self._next_goal()
        self.routes: Routes = given.routes
        self.starts: list[int] = given.starts
        # The priorities of what is given are not known: the walk starts at the first offer.
        self.priority: Priorities = []
        self.lateness: int | None = None
        self.num_vain_offers = 0
        self.movable = [
            stage for stage in range(work.stages) if work.num_live[stage] < work.replicas
        ]

    def _next_goal(self) -> int:
        return self.best.period - max(1, (self.best.period - self.target) // 2)

    def offer(self, routes: Routes, priority: Priorities) -> None:
        table = list_schedule(self.work, routes, priority)
        found = score(self.work, table.starts)
        is_faster = found.period < self.best.period
        if found < self.best:
            self.best, self.table = found, table
            self.goal = self._next_goal()
        late = lateness(self.work, table.starts, goal=self.goal)
        is_nearer = self.lateness is None or is_faster or late < self.lateness
        self.num_vain_offers = 0 if is_nearer else self.num_vain_offers + 1
        if is_nearer or late == self.lateness:
            self.routes, self.priority, self.starts = routes, priority, table.starts
            self.lateness = late

    def step(self) -> None:
        is_stuck = self.num_vain_offers >= STUCK_OFFERS
        if self.draw_routes is not None and (is_stuck or self.rng.random() < DRAWN_SHARE):
            if is_stuck:
                self.lateness = None
            routes = self.draw_routes(self.rng)
            self.offer(routes, drawn_rule(self.work, routes, self.rng))
            return
        changes = [
            self._hurry_needed,
            self._hurry_delayed,
            self._hurry_some,
            self._nudge_some,
            self._nudge_stage,
        ]
        if self.movable:
            changes += [self._swap_routes] * 2
        self.rng.choice(changes)()

    def _late_jobs(self) -> tuple[int, list[int]]:
        """A stage and what one of its late workers runs. There is one: a walk that is as good as
        its goal has set itself another."""
        late = late_workers(self.work, self.routes, self.starts, goal=self.goal)
        stage, replica = self.rng.choice(late)
        return stage, jobs_of(self.routes, stage, replica)

    def _hurry_needed(self) -> None:
        """Something that a late worker stood idle for is held up less on its way."""
        stage, jobs = self._late_jobs()
        everything = [self._operation(job, stage, kind) for job in jobs for kind in (F, B, W)]
        waited_for = after_idling(self.work, self.starts, everything)
        # W comes from the worker itself.
        self._hurry_one([operation for operation in waited_for if operation % 3 != W])

    def _hurry_delayed(self) -> None:
        """Some gradient for a late worker is held up less on its way."""
        stage, jobs = self._late_jobs()
        self._hurry_one([self._operation(job, stage, B) for job in jobs])

    def _hurry_one(self, operations: list[int]) -> None:
        if not operations:
            return
        rng = self.rng
        held_up = delays(self.work, self.starts, rng.choice(operations))
        priority = self.priority[:]
        for delay in rng.sample(held_up, min(len(held_up), rng.choice((1, 1, 2, 3)))):
            self._let_pass(priority, delay)
        self.offer(self.routes, priority)

    def _let_pass(self, priority: Priorities, delay: Delay) -> None:
        """In `priority`, the delayed operation becomes more urgent than one of those that ran while
        it waited; so do, perhaps, those of its kind and micro-batch on the other stages."""
        work, starts = self.work, self.starts
        place, kind = divmod(delay.operation, 3)
        job, stage = divmod(place, work.stages)
        passed = [
            priority[operation]
            for other in jobs_of(self.routes, stage, self.routes[stage][job])
            for operation in (self._operation(other, stage, each) for each in (F, B, W))
            if delay.since <= starts[operation] < starts[delay.operation]
        ]
        if not passed:
            return
        urgency = min(priority[delay.operation], self.rng.choice(passed)) - self.rng.random()
        gain = priority[delay.operation] - urgency
        for each in range(work.stages) if self.rng.random() < 0.5 else [stage]:
            priority[self._operation(job, each, kind)] -= gain

    def _hurry_some(self) -> None:
        """Some of a late worker's micro-batches become more urgent, from some stage on."""
        rng = self.rng
        _, jobs = self._late_jobs()
        priority = self.priority[:]
        for job in rng.sample(jobs, min(len(jobs), rng.choice((1, 1, 2, 3)))):
            gain = abs(rng.gauss(0, 2 * self.work.replicas))
            kinds = rng.choice(((F,), (B,), (F, B)))
            for stage in range(rng.randrange(self.work.stages), self.work.stages):
                for kind in kinds:
                    priority[self._operation(job, stage, kind)] -= gain
        self.offer(self.routes, priority)

    def _swap_routes(self) -> None:
        """Something that a late worker runs and that is adopted somewhere changes places with
        another that is adopted there, so the load stays balanced."""
        _, jobs = self._late_jobs()
        places = [
            (job, stage)
            for job in jobs
            for stage in self.movable
            if self.routes[stage][job] != job // self.work.microbatches
        ]
        if not places:
            return
        one, stage = self.rng.choice(places)
        row = self.routes[stage][:]
        others = [
            job
            for job, adopter in enumerate(row)
            if adopter not in (job // self.work.microbatches, row[one])
        ]
        if not others:
            return
        other = self.rng.choice(others)
        row[one], row[other] = row[other], row[one]
        self.offer([*self.routes[:stage], row, *self.routes[stage + 1 :]], self.priority)

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
                priority[self._operation(job, stage, kind)] += amount
        self.offer(self.routes, priority)

    def _operation(self, job: int, stage: int, kind: int) -> int:
        return (job * self.work.stages + stage) * 3 + kind
