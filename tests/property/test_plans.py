"""What every plan must keep, for all shapes, losses, limits, durations and variants."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from counting_clock import CountingClock
from everstep.schedule.bounds import load_bound, lower_bound
from everstep.schedule.check import check
from everstep.schedule.documents import plan_from_json, plan_to_json
from everstep.schedule.greedy import list_schedule, priorities
from everstep.schedule.improve import improve
from everstep.schedule.late import delays, late_workers, lateness
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem, Variant
from everstep.schedule.routing import Routes, route
from everstep.schedule.store import canonical, rename
from everstep.schedule.walk import Walk
from everstep.schedule.workload import B, score, workload
from problems import problems


@given(problem=problems())
def test_every_plan_passes_the_checker_and_keeps_its_bound(problem: Problem) -> None:
    made = plan(problem)
    assert check(made) == []
    assert made.lower_bound <= made.period * (1 + 1e-9)
    assert made.load_bound <= made.lower_bound * (1 + 1e-9)
    assert made.period <= made.makespan * (1 + 1e-9)


@given(problem=problems())
def test_one_f_one_b_holds_no_more_activations_than_stages_after_it(problem: Problem) -> None:
    made = plan(replace(problem, lost=frozenset(), in_flight=None, variant=Variant.ONE_F_ONE_B))
    for stage, peak in enumerate(made.peak_in_flight):
        assert peak == min(problem.stages - stage, problem.microbatches)


@given(problem=problems())
def test_micro_batches_are_spread_evenly_and_live_workers_keep_their_own(problem: Problem) -> None:
    assert_even_and_own(problem, route(problem))


def assert_even_and_own(problem: Problem, routes: Routes) -> None:
    for stage, row in enumerate(routes):
        live = problem.live(stage)
        loads = [row.count(replica) for replica in live]
        assert sum(loads) == problem.replicas * problem.microbatches
        assert max(loads) - min(loads) <= 1
        for replica in live:
            own = row[replica * problem.microbatches : (replica + 1) * problem.microbatches]
            assert set(own) == {replica}


@given(problem=problems(), seed=st.integers(0, 9))
def test_the_improver_never_returns_a_worse_plan(problem: Problem, seed: int) -> None:
    work, routes = workload(problem), route(problem)
    given_table = list_schedule(work, routes, priorities(work))
    better = improve(
        work, given_table, target=lower_bound(work), budget_s=25, clock=CountingClock(), seed=seed
    )
    assert score(work, better.starts).period <= score(work, given_table.starts).period
    assert check(plan(problem, Effort(improve_s=25, seed=seed), clock=CountingClock())) == []


@given(problem=problems(), seed=st.integers(0, 9))
def test_the_walk_keeps_the_load_even_and_live_workers_their_own(
    problem: Problem, seed: int
) -> None:
    work, routes = workload(problem), route(problem)
    walk = Walk(
        work,
        list_schedule(work, routes, priorities(work)),
        random.Random(seed),
        target=0,
        draw_routes=lambda rng: route(problem, rng=rng),
    )
    walk.offer(routes, priorities(work))
    for _ in range(15):
        walk.step()
    assert_even_and_own(problem, walk.routes)


@given(problem=problems(), shorter=st.integers(0, 9))
def test_somebody_is_late_for_every_goal_below_the_period(problem: Problem, shorter: int) -> None:
    work, routes = workload(problem), route(problem)
    starts = list_schedule(work, routes, priorities(work)).starts
    goal = score(work, starts).period - shorter
    assert (lateness(work, starts, goal=goal) > 0) == (shorter > 0)
    assert bool(late_workers(work, routes, starts, goal=goal)) == (shorter > 0)


@given(problem=problems())
def test_delays_add_up_to_all_the_time_a_micro_batch_took_too_long(problem: Problem) -> None:
    """From its first F to the start of its last B: work, transfers, and what it was held up."""
    work, routes = workload(problem), route(problem)
    starts = list_schedule(work, routes, priorities(work)).starts
    back = sum(work.gradient_delay(stage) for stage in range(1, work.stages))
    unhindered = sum(work.forward) + back + 2 * work.transfer * (work.stages - 1)
    for job in range(work.num_jobs):
        last = job * work.stages * 3 + B
        held_up = [starts[delay.operation] - delay.since for delay in delays(work, starts, last)]
        assert all(ticks > 0 for ticks in held_up)
        assert sum(held_up) == starts[last] - unhindered


@given(problem=problems())
def test_a_plan_survives_json(problem: Problem) -> None:
    made = plan(problem)
    assert plan_from_json(json.loads(json.dumps(plan_to_json(made)))) == made


@given(problem=problems())
def test_renaming_replicas_gives_a_valid_plan_and_back_the_same_one(problem: Problem) -> None:
    renamed, renaming = canonical(problem)
    assert canonical(renamed)[0] == renamed
    made = plan(problem)
    there = rename(made, renaming)
    assert there.problem == renamed
    assert check(there) == []
    back = tuple(sorted(range(problem.replicas), key=lambda replica: renaming[replica]))
    assert rename(there, back) == made


@given(problem=problems(variants=[Variant.DECOUPLED_STAGGERED]))
def test_the_bound_counts_at_least_the_work(problem: Problem) -> None:
    work = workload(problem)
    busiest = max(
        -(-problem.replicas * problem.microbatches // len(problem.live(stage)))
        * (work.forward[stage] + work.input_gradient[stage] + work.weight_gradient[stage])
        for stage in range(problem.stages)
    )
    assert load_bound(work) == busiest
    assert lower_bound(work) >= busiest + work.synchronization
