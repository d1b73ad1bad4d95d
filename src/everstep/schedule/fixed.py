"""Schedules with a fixed order: 1F1B, the pipeline everyone has today and our first baseline."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.schedule.routing import Routes
from everstep.schedule.workload import B, F, Timetable, Workload


def one_f_one_b(stage: int, *, num_stages: int, num_microbatches: int) -> Iterator[tuple[int, int]]:
    """Yields what `stage` does in order, as (F or B, micro-batch); W follows its B at once.

    With 3 stages and 4 micro-batches:

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    """
    num_warmup = min(num_stages - stage - 1, num_microbatches)
    for microbatch in range(num_warmup):
        yield F, microbatch
    for microbatch in range(num_warmup, num_microbatches):
        yield F, microbatch
        yield B, microbatch - num_warmup
    for microbatch in range(num_microbatches - num_warmup, num_microbatches):
        yield B, microbatch


def one_f_one_b_timetable(work: Workload, routes: Routes) -> Timetable:
    """Every worker follows 1F1B as early as it can."""
    table = Timetable(routes, [-1] * (work.num_jobs * work.stages * 3), [])
    for replica in range(work.replicas):
        _run_pipeline(work, table, first_job=replica * work.microbatches)
    return table


def _run_pipeline(work: Workload, table: Timetable, *, first_job: int) -> None:
    stages, microbatches = work.stages, work.microbatches
    todo = [
        list(one_f_one_b(stage, num_stages=stages, num_microbatches=microbatches))[::-1]
        for stage in range(stages)
    ]
    free_at = [0] * stages
    arrives_at: dict[tuple[int, int, int], int] = {(0, F, m): 0 for m in range(microbatches)}
    while any(todo):
        for stage in range(stages):
            while todo[stage] and (stage, *todo[stage][-1]) in arrives_at:
                kind, microbatch = todo[stage].pop()
                start = max(free_at[stage], arrives_at[stage, kind, microbatch])
                operation = ((first_job + microbatch) * stages + stage) * 3 + kind
                table.starts[operation] = start
                table.order.append(operation)
                if kind == F:
                    end = start + work.forward[stage]
                    is_last = stage + 1 == stages
                    following = (stage, B) if is_last else (stage + 1, F)
                else:
                    table.starts[operation + 1] = start + work.input_gradient[stage]
                    table.order.append(operation + 1)
                    end = start + work.gradient_delay(stage)
                    is_last = False
                    following = (stage - 1, B)
                free_at[stage] = end
                arrives_at[*following, microbatch] = end + (0 if is_last else work.transfer)
