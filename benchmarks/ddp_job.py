"""DistributedDataParallel on the job of replicas_job.py: the other side of failure_free.py.

Run by it as `python benchmarks/ddp_job.py MICROBATCHES STEPS OUT`. Same initial weights, samples,
micro-batches, optimizer and threads; gradients are accumulated under `no_sync` and reduced with the
last micro-batch. Writes the seconds and the loss of every step.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import everstep
from everstep.execute.data import Microbatch, SampleOrder, Slicing, fetch
from replicas_job import REPLICAS, make_job


def _work(rank: int, microbatches: int, steps: int, out: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=REPLICAS, timeout=timedelta(seconds=120))
    job = make_job(microbatches)
    torch.manual_seed(job.seed)
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.parameters())
    slicing = _slicing(job)
    losses, seconds = [], []
    ended_s = time.perf_counter()
    for step in range(steps):
        losses.append(_train_one(job, model, optimizer, slicing, step=step, rank=rank))
        began_s, ended_s = ended_s, time.perf_counter()
        seconds.append(ended_s - began_s)
    means = torch.tensor(losses) / REPLICAS
    dist.all_reduce(means)
    if rank == 0:
        Path(out).write_text(json.dumps({"seconds": seconds, "losses": means.tolist()}))
    dist.destroy_process_group()


def _slicing(job: everstep.Job) -> Slicing:
    order = SampleOrder(
        num_samples=len(job.dataset),
        batch_size=job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
    )
    return Slicing(order=order, replicas=REPLICAS, microbatches=job.microbatches)


def _train_one(
    job: everstep.Job,
    model: DistributedDataParallel,
    optimizer: Optimizer,
    slicing: Slicing,
    *,
    step: int,
    rank: int,
) -> float:
    optimizer.zero_grad()
    losses = []
    for number in range(job.microbatches):
        samples = slicing.samples(Microbatch(step, rank, number))
        inputs, target = fetch(job.dataset, samples)
        is_last = number == job.microbatches - 1
        with nullcontext() if is_last else model.no_sync():
            loss: Tensor = job.loss(model(inputs), target) / job.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    optimizer.step()
    return sum(losses)


def main(microbatches: int, steps: int, out: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "everstep.execute.data"])
    workers = [
        context.Process(target=_work, args=(rank, microbatches, steps, out, port))
        for rank in range(REPLICAS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(abs(worker.exitcode or 0) for worker in workers)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
