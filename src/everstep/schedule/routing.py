"""Routes: which worker runs each micro-batch on each stage.

A live worker keeps its own micro-batches. A lost worker's go to the live workers of its stage, so
that no worker of a stage gets more than one micro-batch more than another. Where the division is
uneven the larger share falls on replicas that are delayed least elsewhere: what an adopter does
late, all stages before and after it do late.
"""

from __future__ import annotations

import heapq
import random

from everstep.schedule.problem import Problem

Routes = list[list[int]]
"""`routes[stage][job]` is the replica of the worker that runs the job; job = replica * M + m."""


def route(problem: Problem, *, rng: random.Random | None = None) -> Routes:
    """Stages choose one after the other, the last first: it has the least time to spare.

    Args:
        rng: draws other routes that are balanced as well: another order of stages, other turns.
    """
    burden = [0] * problem.replicas
    for worker in problem.lost:
        burden[worker.replica] += problem.microbatches
    order = list(reversed(range(problem.stages)))
    if rng is not None:
        order = rng.choice((order, order[::-1], rng.sample(order, len(order))))
    rows = {stage: _route_stage(problem, stage, burden, rng) for stage in order}
    return [rows[stage] for stage in range(problem.stages)]


def _route_stage(
    problem: Problem, stage: int, burden: list[int], rng: random.Random | None = None
) -> list[int]:
    """Adds to `burden`, per replica, what is adopted. With 3 replicas x 6 micro-batches and worker
    1 of the stage lost:

    own       0 0 0 0 0 0   . . . . . .   2 2 2 2 2 2
    adopted                 0 2 0 2 0 2     (on stage 0)
    """
    num_microbatches = problem.microbatches
    live = problem.live(stage)
    lost = [r for r in range(problem.replicas) if r not in live]
    runs_on = [job // num_microbatches for job in range(problem.replicas * num_microbatches)]
    # Replicas that are burdened alike take turns.
    turns = [(replica + stage) % problem.replicas for replica in range(problem.replicas)]
    if rng is not None:
        rng.shuffle(turns)
    load = [(0, burden[replica], turns[replica], replica) for replica in live]
    heapq.heapify(load)
    # Micro-batch by micro-batch, not replica by replica: what arrives together is spread.
    for microbatch in range(num_microbatches):
        for replica in lost:
            num_adopted, before, turn, adopter = heapq.heappop(load)
            runs_on[replica * num_microbatches + microbatch] = adopter
            burden[adopter] += 1
            heapq.heappush(load, (num_adopted + 1, before, turn, adopter))
    return runs_on
