"""Builds a job's model as every worker does, and keeps this worker's stage of it.

The random state of whoever asks is left as it was: a worker may build stages in the middle of
training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
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
from everstep.execute.outline import filled_in, outline
from everstep.execute.replay import Piece
from everstep.execute.split import StageModule, split_model
from everstep.execute.stage import Stage, data_parts
from everstep.execute.update import Update
from everstep.recovery.transfer import StageState
from everstep.training.job import Job, check_optimizer, check_shape

HOST = torch.device("cpu")


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
    """All of the model's; the others' are outlines."""

    def piece(self, index: int) -> Piece | None:
        """Another stage than its own, whose state is to be loaded. None where the model would have
        to be built again for it."""
        try:
            other = filled_in(self.stages[index], device=self.stage.device)
        except (TypeError, RuntimeError):
            return None
        return _piece(
            self.job,
            other,
            index,
            num_stages=len(self.stages),
            replicas=self.replicas,
            device=self.stage.device,
        )

    def state(self) -> StageState:
        return StageState(
            module=self.stage.module.module,
            optimizer=self.update.optimizer,
            scheduler=self.update.scheduler,
        )


def hold(
    job: Job, *, me: WorkerId, replicas: int, num_stages: int, device: torch.device = HOST
) -> Holding:
    check_shape(job, replicas=replicas)
    check_dataset(job.dataset)
    stages = _split(job, replicas=replicas, num_stages=num_stages)
    outline(stages, keep=stages[me.stage])
    piece = _piece(
        job,
        stages[me.stage],
        me.stage,
        num_stages=num_stages,
        replicas=replicas,
        device=device,
    )
    return Holding(
        job=job,
        me=me,
        replicas=replicas,
        stage=piece.stage,
        update=piece.update,
        fetcher=fetcher_for(job, data_parts(piece.stage), replicas=replicas, device=device),
        stages=stages,
    )


def build_pieces(
    job: Job, first: int, last: int, *, replicas: int, num_stages: int, device: torch.device
) -> list[Piece]:
    """Stages `first` to `last` as they were when training began."""
    with torch.random.fork_rng(devices=[]):
        stages = _split(job, replicas=replicas, num_stages=num_stages)
    return [
        _piece(job, stages[index], index, num_stages=num_stages, replicas=replicas, device=device)
        for index in range(first, last + 1)
    ]


def fetcher_for(
    job: Job, parts: Iterable[Part], *, replicas: int, device: torch.device
) -> Fetcher | None:
    parts = list(parts)
    if not parts:
        return None
    return Fetcher(job.dataset, _slicing(job, replicas), parts=parts, device=device)


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


def _piece(
    job: Job,
    module: StageModule,
    index: int,
    *,
    num_stages: int,
    replicas: int,
    device: torch.device,
) -> Piece:
    stage = Stage(
        module,
        index=index,
        num_stages=num_stages,
        loss=job.loss,
        metrics=job.metrics,
        loss_scale=1 / (replicas * job.microbatches),
        precision=job.precision,
        seed=job.seed,
        device=device,
    )
    optimizer = _optimizer(job, stage)
    scheduler = None
    if job.scheduler is not None and optimizer is not None:
        scheduler = job.scheduler(optimizer)
    return Piece(stage=stage, update=Update(stage.buckets, optimizer, scheduler, keep=job.keep))


def _optimizer(job: Job, stage: Stage) -> Optimizer | None:
    # In the order of the model, as plain PyTorch would give them.
    params = [p for p in stage.module.module.parameters() if p.requires_grad]
    if not params:
        return None
    optimizer = job.optimizer(params)
    check_optimizer(job, optimizer)
    return optimizer
