"""The planner's front door: a problem goes in, the best checked plan comes out."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.clock import Clock, SystemClock
from everstep.schedule.bounds import load_bound, lower_bound, nearly
from everstep.schedule.check import require_valid
from everstep.schedule.exact import solve
from everstep.schedule.fixed import one_f_one_b_timetable
from everstep.schedule.greedy import list_schedule, priorities
from everstep.schedule.improve import improve
from everstep.schedule.plan import Baselines, Plan, make_plan
from everstep.schedule.problem import Problem, Variant
from everstep.schedule.routing import route
from everstep.schedule.workload import Timetable, Workload, score, workload

GOOD_ENOUGH_FRACTION = 0.01
"""Above the bound. The improver is not started below it: it would spend its whole budget to win
less than the live system's own noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to try. The default is for failure time: greedy alone, in milliseconds."""

    improve_s: float = 0.0
    insist_s: float = 0.0
    """For the improver in all, where `improve_s` leaves the plan far from the bound. Not used under
    an in-flight limit: there the bound itself may be what is far."""

    exact_s: float = 0.0
    """For the exact solver (needs ortools), after the improver."""

    seed: int = 0


UNHURRIED = Effort(improve_s=1.0, insist_s=20.0)
"""What the command does unless it is told otherwise: a second is waited for without noticing, and
the few plans that stay far from the bound are worth twenty (of 2,500 hard ones one took ten)."""


def plan(problem: Problem, effort: Effort | None = None, *, clock: Clock | None = None) -> Plan:
    """Plans one step. Raises NotPlannable when a stage has no live worker."""
    effort = effort or Effort()
    clock = clock or SystemClock()
    work = workload(problem)
    bound = lower_bound(work)
    if problem.variant is Variant.ONE_F_ONE_B:
        # The order is given, so there is nothing to search and nothing better of its kind.
        table = one_f_one_b_timetable(work, route(problem))
        bound = score(work, table.starts).period
    else:
        table = _search(work, problem, bound, effort, clock)
        if effort.exact_s > 0 and score(work, table.starts).period > bound:
            table, bound = solve(work, table, bound=bound, budget_s=effort.exact_s, clock=clock)
    return require_valid(
        make_plan(
            problem,
            work,
            table,
            lower_bound=bound,
            load_bound=load_bound(work),
            baselines=_baselines(problem, effort, clock),
        )
    )


def _search(
    work: Workload, problem: Problem, bound: int, effort: Effort, clock: Clock
) -> Timetable:
    routes = route(problem)
    table = list_schedule(work, routes, priorities(work))
    if effort.improve_s <= 0 or score(work, table.starts).period <= bound * (
        1 + GOOD_ENOUGH_FRACTION
    ):
        return table
    return improve(
        work,
        table,
        target=bound,
        budget_s=effort.improve_s,
        insist_s=effort.insist_s if problem.in_flight is None else 0.0,
        near=nearly(work, bound),
        clock=clock,
        draw_routes=(lambda rng: route(problem, rng=rng)) if len(problem.lost) > 1 else None,
        seed=effort.seed,
    )


def _baselines(problem: Problem, effort: Effort, clock: Clock) -> Baselines:
    one_f_one_b = workload(problem.fault_free(Variant.ONE_F_ONE_B))
    starts = one_f_one_b_timetable(one_f_one_b, []).starts
    fault_free = problem.fault_free(Variant.DECOUPLED_STAGGERED)
    decoupled = workload(fault_free)
    table = _search(decoupled, fault_free, lower_bound(decoupled), effort, clock)
    decoupled_period = decoupled.units(score(decoupled, table.starts).period)
    num_live = problem.num_workers - len(problem.lost)
    return Baselines(
        one_f_one_b=one_f_one_b.units(score(one_f_one_b, starts).period),
        decoupled=decoupled_period,
        fault_scaled=decoupled_period * problem.num_workers / num_live,
    )
