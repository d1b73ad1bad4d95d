"""everstep and DistributedDataParallel train the same job in the same workers, taking turns.

Run by `everstep run`: MICROBATCHES TURNS STEPS_PER_TURN FOLDER. Same initial weights, samples,
micro-batches, optimizer and threads; DDP accumulates gradients under `no_sync` and reduces them
with the last micro-batch. Writes the seconds of every turn and the losses of DDP to FOLDER.

    everstep |#####|     |#####|     |#####|        a turn lasts a second or so: a slow moment of
    DDP      |     |#####|     |#####|     |        the machine hits both sides
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.execute.data import Microbatch, SampleOrder, Slicing, fetch
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss

REPLICAS = 2
SAMPLES_PER_REPLICA = 8
LENGTH = 64


def make_job(microbatches: int) -> everstep.Job:
    """3.2 million parameters, about 0.2 s a step. Without dropout both sides' losses are equal."""
    return everstep.Job(
        model=lambda: char_gpt(width=256, blocks=4, length=LENGTH, dropout=0.0),
        loss=next_character_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        dataset=Characters(length=LENGTH),
        batch_size=REPLICAS * SAMPLES_PER_REPLICA,
        microbatches=microbatches,
    )


class DdpSide:
    """The job in a plain loop. Which of the workers is which rank does not matter to the sums."""

    def __init__(self, job: everstep.Job, *, meeting: Path) -> None:
        store = dist.FileStore(str(meeting), REPLICAS)  # type: ignore[attr-defined]
        self.rank = store.add("ranks", 1) - 1
        limit = timedelta(seconds=120)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=REPLICAS, timeout=limit
        )
        torch.manual_seed(job.seed)
        self._job = job
        self._model = DistributedDataParallel(job.model())
        self._optimizer = job.optimizer(self._model.parameters())
        order = SampleOrder(num_samples=len(job.dataset), batch_size=job.batch_size, seed=job.seed)
        self._slicing = Slicing(order=order, replicas=REPLICAS, microbatches=job.microbatches)
        self.losses: list[float] = []
        """Of each step, this worker's half of the batch."""

    def step(self) -> None:
        job = self._job
        self._optimizer.zero_grad()
        losses = []
        for number in range(job.microbatches):
            mb = Microbatch(len(self.losses), self.rank, number)
            inputs, target = fetch(job.dataset, self._slicing.samples(mb))
            is_last = number == job.microbatches - 1
            with nullcontext() if is_last else self._model.no_sync():
                loss: Tensor = job.loss(self._model(inputs), target) / job.microbatches
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        self._optimizer.step()
        self.losses.append(sum(losses))

    def mean_losses(self) -> list[float]:
        means = torch.tensor(self.losses, dtype=torch.float64) / REPLICAS
        dist.all_reduce(means)
        return [float(mean) for mean in means.tolist()]


def main(microbatches: int, turns: int, steps_per_turn: int, folder: Path) -> None:
    job = make_job(microbatches)
    run = everstep.train(job, steps=turns * steps_per_turn)
    ddp = DdpSide(job, meeting=folder / "meeting")
    steps = iter(run)
    seconds: dict[str, list[float]] = {"everstep": [], "ddp": []}
    for _ in range(turns):
        seconds["everstep"].append(_turn(lambda: next(steps), steps_per_turn))
        seconds["ddp"].append(_turn(ddp.step, steps_per_turn))
    losses = ddp.mean_losses()
    if run.is_reporter:
        measured = {**seconds, "losses": losses}
        (folder / "measured.json").write_text(json.dumps(measured))
    dist.destroy_process_group()
    for _ in steps:
        pass


def _turn(step: Callable[[], object], num_steps: int) -> float:
    """Seconds per step, from when both workers are ready to when both are done."""
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began_s) / num_steps


if __name__ == "__main__":
    *numbers, path = sys.argv[1:]
    num_microbatches, num_turns, num_steps = map(int, numbers)
    main(num_microbatches, num_turns, num_steps, Path(path))
