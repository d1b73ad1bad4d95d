"""A small training loop under Autosave, run in processes that the tests kill.

It says after every step what it drew and lost, and at the end what became of its state, so that two
runs can be held against each other bit for bit. A module of its own: forkserver must import it.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import everstep
from everstep.checkpoint.baselines import EverySteps
from everstep.checkpoint.engine import EngineSettings

WAIT_S = 60.0
QUICK = EngineSettings(probe_bytes=0)
"""Does not measure the disk, which the tests do not ask about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    directory: Path
    total: int = 24
    every: int = 3
    num_workers: int = 0
    accumulate: int = 1
    width: int = 16
    ranks: int = 1
    meeting: Path | None = None


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Forty samples with augmentation: in a worker, drawn from the worker's generator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.arange(8.0) * (index + 1) / 40
        return features + 0.1 * torch.randn(8), features.sum().unsqueeze(0)


class Ended(Exception):
    """The process ended before it said what was waited for."""


@dataclass(slots=True)
class Run:
    process: BaseProcess
    pipe: Connection
    steps: dict[int, str] = field(default_factory=dict)
    """By step: the batch and the loss, as a digest."""

    def hear(self) -> Any:
        if not self.pipe.poll(WAIT_S):
            raise AssertionError(f"process {self.process.pid} said nothing for {WAIT_S} s")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):  # An OSError when it was killed in the middle of a message.
            raise Ended from None

    def hear_step(self) -> int:
        kind, step, digest = self.hear()
        assert kind == "step"
        self.steps[step] = digest
        return int(step)

    def hear_steps_to_the_end(self) -> None:
        """Until the process is gone, which must happen by itself."""
        with contextlib.suppress(Ended):
            while True:
                self.hear_step()

    def hear_end(self) -> tuple[str, list[dict[str, Any]]]:
        """The digest of the state, and the events."""
        while True:
            heard = self.hear()
            if heard[0] == "end":
                return heard[1], heard[2]
            self.steps[heard[1]] = heard[2]

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@contextmanager
def running(job: Job, rank: int = 0) -> Iterator[Run]:
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch's compiler, which takes seconds.
    context.set_forkserver_preload(["torch", "torch._dynamo", "autosave_job"])
    ours, theirs = context.Pipe()
    # Not a daemon: those may not have children, and a loader has workers.
    process = context.Process(target=train, args=(theirs, job, rank))
    process.start()
    theirs.close()
    run = Run(process=process, pipe=ours)
    try:
        yield run
    finally:
        run.kill()
        ours.close()


def undisturbed(job: Job) -> Run:
    """The whole job in one go; its last word is kept in `steps[-1]`."""
    with running(job) as run:
        run.steps[-1], _ = run.hear_end()
        return run


def train(pipe: Connection, job: Job, rank: int = 0) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7 + rank)
    model, optimizer, scheduler, loader = build(job, rank)
    saver = everstep.Autosave(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        directory=job.directory,
        policy=EverySteps(job.every),
        engine=QUICK,
    )
    for step, (inputs, targets) in saver.steps(loader, total=job.total):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if (step + 1) % job.accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        saver.report(loss)
        pipe.send(("step", step, digest({"inputs": inputs, "loss": loss})))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    pipe.send(("end", digest(state), list(saver.events)))
    if job.ranks > 1:
        dist.destroy_process_group()


def build(job: Job, rank: int) -> tuple[nn.Module, Any, Any, DataLoader[Any]]:
    model: nn.Module = nn.Sequential(
        nn.Linear(8, job.width), nn.BatchNorm1d(job.width), nn.Dropout(0.3), nn.Linear(job.width, 1)
    )
    sampler: DistributedSampler[Any] | None = None
    if job.ranks > 1:
        assert job.meeting is not None
        store = dist.FileStore(str(job.meeting), job.ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks)
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(Noisy(), num_replicas=job.ranks, rank=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.total)
    loader = DataLoader(
        Noisy(),
        batch_size=4,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=job.num_workers,
        # The start method of a process that forkserver made would import torch in every worker.
        multiprocessing_context="fork" if job.num_workers else None,
    )
    return model, optimizer, scheduler, loader


def digest(tree: Any) -> str:
    """Of every bit of every tensor, in order."""
    seen = hashlib.sha256()

    def add(node: Any) -> None:
        if isinstance(node, Tensor):
            seen.update(node.detach().contiguous().numpy().tobytes())
        elif isinstance(node, dict):
            for key, value in node.items():
                seen.update(str(key).encode())
                add(value)

    add(tree)
    return seen.hexdigest()
