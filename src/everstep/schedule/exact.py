"""The exact solver: CP-SAT asks whether a timetable of a given period exists, from the bound up.

"No" raises the lower bound by a proof; the first "yes" is then optimal. Minimising the period
directly is far weaker. Needs ortools (extra `exact`); nothing else in everstep does.

Live workers keep their own micro-batches; who adopts the others is for the solver to choose.
"""

from __future__ import annotations

import os
from itertools import combinations
from typing import TYPE_CHECKING, Any

from everstep.core.clock import Clock
from everstep.core.errors import ConfigError, MissingExtra
from everstep.schedule.routing import Routes
from everstep.schedule.workload import B, F, Timetable, W, Workload, score

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

Bool = Any
"""A literal of the model, or a plain bool where the route is not a question."""


def solve(
    work: Workload, best: Timetable, *, bound: int, budget_s: float, clock: Clock
) -> tuple[Timetable, int]:
    """The best timetable found and the highest period proved impossible plus one."""
    if not all((*work.forward, *work.input_gradient, *work.weight_gradient)):
        rule = "the exact solver needs every F, B and W to take time; a small number will do"
        raise ConfigError("durations", "zero somewhere", rule)
    deadline_s = clock.now_s() + budget_s
    step = _period_step(work)
    is_proved = True
    for period in range(bound, score(work, best.starts).period, step):
        # A question that is too hard must leave time for the next, easier one.
        remaining_s = (deadline_s - clock.now_s()) / 2
        if remaining_s <= 0:
            break
        answer = _Question(work, period, hint=best).ask(remaining_s)
        if isinstance(answer, Timetable):
            return answer, bound
        is_proved = is_proved and answer == "impossible"
        if is_proved:
            bound = period + step
    return best, bound


def _period_step(work: Workload) -> int:
    """Fine ticks of measured durations are not worth a question each."""
    smallest = min(*work.forward, *work.input_gradient, *work.weight_gradient)
    return max(1, smallest // 4)


class _Question:
    """Is there a timetable of this period? One CP-SAT model."""

    def __init__(self, work: Workload, period: int, *, hint: Timetable) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise MissingExtra("ortools", extra="exact", needed_for="the exact solver") from error
        self.cp = cp_model
        self.work = work
        self.period = period
        self.model: CpModel = cp_model.CpModel()
        self.live = _live_replicas(work, hint.routes)
        # Staggered, the windows of later stages begin later; nothing starts after the last ends.
        self.horizon = period * (2 if work.is_staggered else 1)
        num_operations = work.num_jobs * work.stages * 3
        self.start: list[IntVar] = [
            self.model.new_int_var(0, self.horizon, f"o{number}")
            for number in range(num_operations)
        ]
        self.runs: dict[tuple[int, int, int], Bool] = {}
        self._choose_routes()
        self._respect_dependencies()
        self._fit_windows()
        self._share_workers()
        self._break_symmetry()
        for number, variable in enumerate(self.start):
            self.model.add_hint(variable, hint.starts[number])

    def ask(self, budget_s: float) -> Timetable | str:
        """A timetable, "impossible" or "unknown"."""
        solver = self.cp.CpSolver()
        solver.parameters.num_search_workers = os.cpu_count() or 1
        deadline = budget_s
        while True:
            solver.parameters.max_time_in_seconds = max(deadline, 0.01)
            status = solver.solve(self.model)
            if status == self.cp.INFEASIBLE:
                return "impossible"
            if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
                return "unknown"
            table = self._read(solver)
            overtakers = _overtakers(self.work, table)
            if not overtakers:
                return table
            # Different kinds of routes rarely share a channel, so its order is asked for late.
            for stage, kind, one, other in overtakers:
                self._keep_order(stage, kind, one, other)
            deadline -= solver.wall_time

    def _duration(self, stage: int, kind: int) -> int:
        work = self.work
        return (work.forward, work.input_gradient, work.weight_gradient)[kind][stage]

    def _operation(self, job: int, stage: int, kind: int) -> int:
        return (job * self.work.stages + stage) * 3 + kind

    def _choose_routes(self) -> None:
        work = self.work
        for stage in range(work.stages):
            live = self.live[stage]
            most = self.period // max(1, sum(self._duration(stage, kind) for kind in (F, B, W)))
            for job in range(work.num_jobs):
                owner = job // work.microbatches
                if owner in live:
                    self.runs.update({(stage, job, r): r == owner for r in live})
                else:
                    choice = {r: self.model.new_bool_var(f"r{stage}.{job}.{r}") for r in live}
                    self.model.add_exactly_one(choice.values())
                    self.runs.update({(stage, job, r): literal for r, literal in choice.items()})
            for replica in live:
                self.model.add(
                    sum(self.runs[stage, job, replica] for job in range(work.num_jobs)) <= most
                )

    def _respect_dependencies(self) -> None:
        work, model, start = self.work, self.model, self.start
        for job in range(work.num_jobs):
            for stage in range(work.stages):
                forward, gradient, weight = (self._operation(job, stage, k) for k in (F, B, W))
                after_forward = start[forward] + work.forward[stage]
                after_gradient = start[gradient] + work.input_gradient[stage]
                model.add(start[gradient] >= after_forward)
                if work.is_glued:
                    model.add(start[weight] == after_gradient)
                else:
                    model.add(start[weight] >= after_gradient)
                if stage + 1 < work.stages:
                    model.add(start[forward + 3] >= after_forward + work.transfer)
                if stage:
                    leaves = start[gradient] + work.gradient_delay(stage)
                    model.add(start[gradient - 3] >= leaves + work.transfer)

    def _fit_windows(self) -> None:
        """All of a stage happens within one period, its synchronization included."""
        work, model = self.work, self.model
        length = self.period - work.synchronization
        for stage in range(work.stages):
            opens: Any = 0
            if work.is_staggered:
                opens = model.new_int_var(0, self.horizon - self.period, f"opens{stage}")
            for job in range(work.num_jobs):
                first, last = self._operation(job, stage, F), self._operation(job, stage, W)
                model.add(self.start[first] >= opens)
                model.add(self.start[last] + work.weight_gradient[stage] <= opens + length)

    def _share_workers(self) -> None:
        """A worker does one thing at a time and holds no more micro-batches than its limit."""
        work, model = self.work, self.model
        for stage in range(work.stages):
            for replica in self.live[stage]:
                busy, held = [], []
                for job in range(work.num_jobs):
                    runs = self.runs[stage, job, replica]
                    if runs is False:
                        continue
                    for kind in (F, B, W):
                        operation = self._operation(job, stage, kind)
                        busy.append(
                            model.new_optional_fixed_size_interval_var(
                                self.start[operation], self._duration(stage, kind), runs, ""
                            )
                        )
                    first, last = self._operation(job, stage, F), self._operation(job, stage, W)
                    end = self.start[last] + work.weight_gradient[stage]
                    size = model.new_int_var(0, self.period, "")
                    held.append(
                        model.new_optional_interval_var(self.start[first], size, end, runs, "")
                    )
                model.add_no_overlap(busy)
                if work.limit[stage] < work.num_jobs:
                    model.add_cumulative(held, [1] * len(held), work.limit[stage])

    def _break_symmetry(self) -> None:
        """Micro-batches of one replica are alike. Those on one route can be sorted everywhere;
        those that part at one lost stage can be sorted up to it."""
        work, model, start = self.work, self.model, self.start
        for replica in range(work.replicas):
            jobs = range(replica * work.microbatches, (replica + 1) * work.microbatches)
            parts = [stage for stage in range(work.stages) if replica not in self.live[stage]]
            if len(parts) > 1:
                continue
            sorted_until = parts[0] if parts else work.stages - 1
            for one, other in combinations(jobs, 2):
                for stage in range(sorted_until + 1):
                    first, second = (self._operation(job, stage, F) for job in (one, other))
                    model.add(start[first] <= start[second])
                together = [[]] if not parts else self._same_route(parts[0], one, other)
                for literals in together:
                    for offset in range(work.stages * 3):
                        first = one * work.stages * 3 + offset
                        second = other * work.stages * 3 + offset
                        order = model.add(start[first] <= start[second])
                        if literals:
                            order.only_enforce_if(literals)

    def _same_route(self, stage: int, one: int, other: int) -> list[list[Bool]]:
        """The ways two micro-batches can have the same adopter on their one lost stage."""
        return [
            [self.runs[stage, one, replica], self.runs[stage, other, replica]]
            for replica in self.live[stage]
        ]

    def _keep_order(self, stage: int, kind: int, one: int, other: int) -> None:
        """Two micro-batches that share a channel into `stage` leave it in the order they enter."""
        from_stage = stage - 1 if kind == F else stage + 1
        model, start = self.model, self.start
        enters_first = model.new_bool_var("")
        for literal, (first, second) in (
            (enters_first, (one, other)),
            (~enters_first, (other, one)),
        ):
            for at in (from_stage, stage):
                earlier, later = (self._operation(job, at, kind) for job in (first, second))
                for before in self.live[from_stage]:
                    for after in self.live[stage]:
                        shared = [
                            self.runs[where, job, replica]
                            for where, replica in ((from_stage, before), (stage, after))
                            for job in (one, other)
                        ]
                        if any(runs is False for runs in shared):
                            continue
                        conditions = [runs for runs in shared if runs is not True]
                        model.add(start[earlier] <= start[later]).only_enforce_if(
                            [literal, *conditions]
                        )

    def _read(self, solver: Any) -> Timetable:
        work = self.work
        routes: Routes = []
        for stage in range(work.stages):
            row = []
            for job in range(work.num_jobs):
                for replica in self.live[stage]:
                    runs = self.runs[stage, job, replica]
                    if runs if isinstance(runs, bool) else solver.boolean_value(runs):
                        row.append(replica)
            routes.append(row)
        starts = [solver.value(variable) for variable in self.start]
        return Timetable(routes, starts, sorted(range(len(starts)), key=starts.__getitem__))


def _live_replicas(work: Workload, routes: Routes) -> list[list[int]]:
    """A live worker keeps at least its own micro-batches, so the routes name all live ones."""
    return [sorted(set(row)) for row in routes[: work.stages]]


def _overtakers(work: Workload, table: Timetable) -> list[tuple[int, int, int, int]]:
    """(stage, kind, one, other): pairs that overtake each other in a channel into the stage."""
    found = []
    for stage in range(work.stages):
        for kind, from_stage in ((F, stage - 1), (B, stage + 1)):
            if not 0 <= from_stage < work.stages:
                continue
            channels: dict[tuple[int, int], list[int]] = {}
            for job in range(work.num_jobs):
                ends = (table.routes[from_stage][job], table.routes[stage][job])
                channels.setdefault(ends, []).append(job)
            for jobs in channels.values():
                for one, other in combinations(jobs, 2):
                    at = [
                        table.starts[(job * work.stages + where) * 3 + kind]
                        for where in (from_stage, stage)
                        for job in (one, other)
                    ]
                    if (at[0] < at[1]) != (at[2] < at[3]):
                        found.append((stage, kind, one, other))
    return found
