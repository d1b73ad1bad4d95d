"""Builds a job's model as every worker does, and keeps this worker's stage of it.

The random state of whoever asks is left as it was: a worker may build stages in the middle of
training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.core.ids import WorkerId
from everstep.execute.data import (
    Fetcher,
    Microbatch,
    Part,
    SampleOrder,
    Slicing,
    check_dataset,
    fetch,
)
from everstep.execute.replay import Piece
from everstep.execute.split import StageModule, split_model
from everstep.execute.stage import Stage, data_parts
from everstep.execute.update import Update
from everstep.recovery.transfer import StageState
from everstep.training.job import Job, check_optimizer, check_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a worker has and keeps from generation to generation."""

    job: Job
    me: WorkerId
    replicas: int
    stage: Stage
    update: Update
    fetcher: Fetcher | None
    stages: list[StageModule]
    """All of the model's, for the names of what the others hold."""

    def piece(self, index: int) -> Piece | None:
        """Another stage than its own, in the memory of the model that was built when this worker
        began: its state is to be loaded. None where that cannot be apart from the worker's own."""
        mine, other = self.stages[self.me.stage].module, self.stages[index].module
        if not _tensors(mine).isdisjoint(_tensors(other)):
            return None
        return _piece(self.job, self.stages, index, replicas=self.replicas)

    def state(self) -> StageState:
        return StageState(
            module=self.stage.module.module,
            optimizer=self.update.optimizer,
            scheduler=self.update.scheduler,
        )


def hold(job: Job, *, me: WorkerId, replicas: int, num_stages: int) -> Holding:
    check_shape(job, replicas=replicas)
    check_dataset(job.dataset)
    stages = _split(job, replicas=replicas, num_stages=num_stages)
    piece = _piece(job, stages, me.stage, replicas=replicas)
    return Holding(
        job=job,
        me=me,
        replicas=replicas,
        stage=piece.stage,
        update=piece.update,
        fetcher=fetcher_for(job, data_parts(piece.stage), replicas=replicas),
        stages=stages,
    )


def build_pieces(job: Job, first: int, last: int, *, replicas: int, num_stages: int) -> list[Piece]:
    """Stages `first` to `last` as they were when training began."""
    with torch.random.fork_rng(devices=[]):
        stages = _split(job, replicas=replicas, num_stages=num_stages)
    return [_piece(job, stages, index, replicas=replicas) for index in range(first, last + 1)]


def fetcher_for(job: Job, parts: Iterable[Part], *, replicas: int) -> Fetcher | None:
    parts = list(parts)
    return Fetcher(job.dataset, _slicing(job, replicas), parts=parts) if parts else None


def _slicing(job: Job, replicas: int) -> Slicing:
    order = SampleOrder(
        num_samples=len(job.dataset),
        batch_size=job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
    )
    return Slicing(order=order, replicas=replicas, microbatches=job.microbatches)


def _split(job: Job, *, replicas: int, num_stages: int) -> list[StageModule]:
    torch.manual_seed(job.seed)
    model = job.model()
    samples = _slicing(job, replicas).samples(Microbatch(0, 0, 0))
    example, _ = fetch(job.dataset, samples, parts=["input"])
    return split_model(model, num_stages=num_stages, example=example, split=job.split)


def _piece(job: Job, stages: list[StageModule], index: int, *, replicas: int) -> Piece:
    stage = Stage(
        stages[index],
        index=index,
        num_stages=len(stages),
        loss=job.loss,
        metrics=job.metrics,
        loss_scale=1 / (replicas * job.microbatches),
        precision=job.precision,
        seed=job.seed,
    )
    optimizer = _optimizer(job, stage)
    scheduler = None
    if job.scheduler is not None and optimizer is not None:
        scheduler = job.scheduler(optimizer)
    return Piece(stage=stage, update=Update(stage.buckets, optimizer, scheduler, keep=job.keep))


def _tensors(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


def _optimizer(job: Job, stage: Stage) -> Optimizer | None:
    # In the order of the model, as plain PyTorch would give them.
    params = [p for p in stage.module.module.parameters() if p.requires_grad]
    if not params:
        return None
    optimizer = job.optimizer(params)
    check_optimizer(job, optimizer)
    return optimizer
