"""The planner's periods for any losses, remembered by how many workers each stage has lost.

Which replica a lost worker belonged to hardly matters for the period, so one plan stands for all
losses with the same counts. Plans of large shapes take seconds: when the budget is spent, the
planner's lower bound stands in, times the mean gap of the plans that were made. `quality` tells.
Repeatable: the budget is in micro-batches planned, not in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from everstep.core.ids import WorkerId
from everstep.schedule.bounds import lower_bound, stage_bound
from everstep.schedule.durations import Durations
from everstep.schedule.fixed import one_f_one_b_timetable
from everstep.schedule.greedy import list_schedule, priorities
from everstep.schedule.plan import Plan
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem, Variant
from everstep.schedule.routing import route
from everstep.schedule.workload import Workload, makespan, score, workload

Losses = tuple[int, ...]
"""Per stage."""

PLAN_BUDGET = 24_000
"""Micro-batches times stages: about two seconds of planning for each way to arrange a step. The
first pattern is planned whatever it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    num_planned: int
    num_bounded: int
    mean_gap: float
    worst_gap: float


class Periods:
    def __init__(self, problem: Problem, *, budget: int = PLAN_BUDGET) -> None:
        self.problem = problem
        self._budget = budget
        self._spent = 0
        self._periods: dict[Losses, float] = {}
        self._bounds: dict[tuple[int, int], float] = {}
        self._gaps: list[float] = []
        self._fillings: dict[Losses, float] = {}

    def period(self, losses: Losses) -> float:
        found = self._periods.get(losses)
        if found is None:
            found = self._periods[losses] = self._make(losses)
        return found

    def _make(self, losses: Losses) -> float:
        if not any(losses):
            return self.fault_free.period
        size = self.problem.replicas * self.problem.microbatches * self.problem.stages
        if self._gaps and self._spent + size > self._budget:
            mean = sum(self._gaps) / len(self._gaps)
            return max(self.bound(losses) * (1 + mean), self.fault_free.period)
        self._spent += size
        period, makespan_s, gap = _planned(replace(self.problem, lost=places(losses)))
        self._gaps.append(gap)
        self._fillings[losses] = makespan_s - period
        return period

    @cached_property
    def fault_free(self) -> Plan:
        """Of one replica: all are alike."""
        return plan(self.problem.fault_free(self.problem.variant))

    @cached_property
    def _work(self) -> Workload:
        return workload(self.problem)

    def bound(self, losses: Losses) -> float:
        """A stage's bound depends on its own losses alone."""
        return max(self.stage_bound(stage, lost) for stage, lost in enumerate(losses))

    def stage_bound(self, stage: int, num_lost: int) -> float:
        key = (stage, num_lost)
        if key not in self._bounds:
            work = self._work
            bound = stage_bound(work, stage, num_live=self.problem.replicas - num_lost)
            self._bounds[key] = work.units(max(bound, self._fault_free_bound))
        return self._bounds[key]

    @cached_property
    def _fault_free_bound(self) -> int:
        return lower_bound(self._work)

    def filling_s(self, losses: Losses) -> float:
        """What the first step of a generation takes longer: the pipeline is empty. Little where the
        first stage is the one that is hit, because it begins at once; that of the plan without
        losses where there is no plan."""
        self.period(losses)
        return self._fillings.get(losses, self.fault_free.makespan - self.fault_free.period)

    def finish_phases(self) -> list[float]:
        """Per stage, at which share of a step it has updated; the last one defines the step's end.
        Staggered stages end apart, so a loss may find some of them one step ahead."""
        made = self.fault_free
        if not self.problem.variant.is_staggered:
            return [1.0] * self.problem.stages
        ends = [
            max(action.end for action in made.actions[WorkerId(0, stage)])
            for stage in range(self.problem.stages)
        ]
        last = max(ends)
        return [max(0.0, 1.0 - (last - end) / made.period) for end in ends]

    def quality(self) -> Quality:
        num_lossy = sum(1 for losses in self._periods if any(losses))
        return Quality(
            num_planned=len(self._gaps),
            num_bounded=num_lossy - len(self._gaps),
            mean_gap=sum(self._gaps) / len(self._gaps) if self._gaps else 0.0,
            worst_gap=max(self._gaps, default=0.0),
        )


@lru_cache(maxsize=4096)
def _planned(problem: Problem) -> tuple[float, float, float]:
    """Period, makespan and gap: those of `plan(problem)`, without laying the plan out, checking it
    and planning its baselines, which takes twice as long again (a property test compares them).

    Shared by all runs of a process: the budget counts either way, so what is remembered changes how
    long a run takes, not what it says.
    """
    work = workload(problem)
    table = list_schedule(work, route(problem), priorities(work))
    period = score(work, table.starts).period
    gap = period / lower_bound(work) - 1
    return work.units(period), work.units(makespan(work, table.starts)), gap


def counts(lost: frozenset[WorkerId], num_stages: int) -> Losses:
    losses = [0] * num_stages
    for worker in lost:
        losses[worker.stage] += 1
    return tuple(losses)


def places(losses: Losses) -> frozenset[WorkerId]:
    """Some places with these counts."""
    return frozenset(
        WorkerId(replica, stage) for stage, lost in enumerate(losses) for replica in range(lost)
    )


@lru_cache(maxsize=4096)
def one_f_one_b_s(durations: Durations, microbatches: int) -> float:
    """The 1F1B step of one replica, as the planner finds its baseline."""
    problem = Problem(
        replicas=1,
        stages=len(durations.stages),
        microbatches=microbatches,
        durations=durations,
        variant=Variant.ONE_F_ONE_B,
    )
    work = workload(problem)
    return work.units(score(work, one_f_one_b_timetable(work, []).starts).period)
