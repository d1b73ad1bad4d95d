"""torch's own pipelines on the same emulated devices: the other side of failure_free.py.

Run by it as `python benchmarks/torch_pipeline.py SCHEDULE STAGES MICROBATCHES STEPS F B W OUT`,
SCHEDULE being `1f1b` or `zero-bubble` (interleaved, two half-size stages a worker).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from everstep.testing.emulate import EmulatedLayer

SIZE = 8


def _work(
    rank: int,
    kind: str,
    ranks: int,
    microbatches: int,
    steps: int,
    times: list[float],
    out: str,
    port: int,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    per_rank = 1 if kind == "1f1b" else 2
    forward_s, input_gradient_s, weight_gradient_s = (seconds / per_rank for seconds in times)
    layers = [
        EmulatedLayer(forward_s, input_gradient_s, weight_gradient_s, SIZE) for _ in range(per_rank)
    ]
    batch = torch.zeros(microbatches, SIZE)
    stages: list[Any] = [  # the schedules want a list of the base class, which is private
        PipelineStage(layer, rank + number * ranks, ranks * per_rank, torch.device("cpu"))
        for number, layer in enumerate(layers)
    ]
    loss = nn.functional.mse_loss
    schedule: Schedule1F1B | ScheduleInterleavedZeroBubble
    if kind == "1f1b":
        schedule = Schedule1F1B(stages[0], microbatches, loss_fn=loss)
    else:
        schedule = ScheduleInterleavedZeroBubble(stages, microbatches, loss_fn=loss)
    params = [param for layer in layers for param in layer.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began_s = time.perf_counter()
        optimizer.zero_grad()
        inputs = (batch,) if rank == 0 else ()
        target = torch.zeros(microbatches, SIZE) if rank == ranks - 1 else None
        schedule.step(*inputs, target=target)
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - began_s)
    if rank == 0:
        Path(out).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def main(kind: str, ranks: int, microbatches: int, steps: int, times: list[float], out: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.pipelining"])
    workers = [
        context.Process(
            target=_work, args=(rank, kind, ranks, microbatches, steps, times, out, port)
        )
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(abs(worker.exitcode or 0) for worker in workers)


if __name__ == "__main__":
    schedule_kind, *numbers, path = sys.argv[1:]
    num_ranks, num_microbatches, num_steps = map(int, numbers[:3])
    durations = [float(number) for number in numbers[3:]]
    sys.exit(main(schedule_kind, num_ranks, num_microbatches, num_steps, durations, path))
