"""Routes: which worker runs each micro-batch on each stage.

A live worker keeps its own micro-batches. A lost worker's go to the live workers of its stage, so
that no worker of a stage gets more than one micro-batch more than another.
"""

from __future__ import annotations

import heapq

from everstep.schedule.problem import Problem

Routes = list[list[int]]
"""`routes[stage][job]` is the replica of the worker that runs the job; job = replica * M + m."""


def route(problem: Problem) -> Routes:
    return [_route_stage(problem, stage) for stage in range(problem.stages)]


def _route_stage(problem: Problem, stage: int) -> list[int]:
    """With 3 replicas x 6 micro-batches and worker 1 of the stage lost:

    own       0 0 0 0 0 0   . . . . . .   2 2 2 2 2 2
    adopted                 0 2 0 2 0 2     (on stage 0)
    """
    num_microbatches = problem.microbatches
    live = problem.live(stage)
    lost = [r for r in range(problem.replicas) if r not in live]
    runs_on = [job // num_microbatches for job in range(problem.replicas * num_microbatches)]
    # The remainder of an uneven division falls on other replicas at each stage.
    load = [(0, (replica + stage) % problem.replicas, replica) for replica in live]
    heapq.heapify(load)
    # Micro-batch by micro-batch, not replica by replica: what arrives together is spread.
    for microbatch in range(num_microbatches):
        for replica in lost:
            num_adopted, turn, adopter = heapq.heappop(load)
            runs_on[replica * num_microbatches + microbatch] = adopter
            heapq.heappush(load, (num_adopted + 1, turn, adopter))
    return runs_on
