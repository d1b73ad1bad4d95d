"""Routes: which worker runs each micro-batch on each stage.

A live worker keeps its own micro-batches. A lost worker's go to the live workers of its stage, so
that no worker of a stage gets more than one micro-batch more than another. Where the division is
uneven the larger share falls on replicas that are delayed least elsewhere: what an adopter does
late, all stages before and after it do late.
"""

from __future__ import annotations

import heapq

from everstep.schedule.problem import Problem

Routes = list[list[int]]
"""`routes[stage][job]` is the replica of the worker that runs the job; job = replica * M + m."""


def route(problem: Problem, *, is_last_first: bool = True) -> Routes:
    """Stages choose one after the other; `is_last_first` says from which end. The last stage has
    the least time to spare, so it may choose first; with many losses the other way is at times
    better."""
    burden = [0] * problem.replicas
    for worker in problem.lost:
        burden[worker.replica] += problem.microbatches
    stages = range(problem.stages)
    order = reversed(stages) if is_last_first else stages
    rows = {stage: _route_stage(problem, stage, burden) for stage in order}
    return [rows[stage] for stage in stages]


def _route_stage(problem: Problem, stage: int, burden: list[int]) -> list[int]:
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
    load = [(0, burden[replica], (replica + stage) % problem.replicas, replica) for replica in live]
    heapq.heapify(load)
    # Micro-batch by micro-batch, not replica by replica: what arrives together is spread.
    for microbatch in range(num_microbatches):
        for replica in lost:
            num_adopted, before, turn, adopter = heapq.heappop(load)
            runs_on[replica * num_microbatches + microbatch] = adopter
            burden[adopter] += 1
            heapq.heappush(load, (num_adopted + 1, before, turn, adopter))
    return runs_on
