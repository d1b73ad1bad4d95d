"""A job: what to train, as the user describes it. The same object on every worker.

Checked in two rounds: what the fields alone can tell when the job is made, and what the shape of
the run adds (replicas, stages) before the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.core.errors import ConfigError
from everstep.execute.data import Dataset
from everstep.execute.split import StageModule
from everstep.execute.stage import Scorer
from everstep.membership.facts import ClipMode
from everstep.recovery.logging_settings import Logging
from everstep.recovery.undo import Keep, NotUndoable, check_undoable
from everstep.training.saving import Checkpoints


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train. See README for an example."""

    model: Callable[[], nn.Module]
    """Builds the whole model; called on every worker right after `torch.manual_seed(seed)`."""

    loss: Scorer
    """(output, target) -> the mean over the samples."""

    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    dataset: Dataset
    """Map-style; `dataset[i]` must be a function of `i`, because any worker may fetch it."""

    batch_size: int
    """Samples per step, over all replicas and micro-batches."""

    microbatches: int
    """Per replica."""

    seed: int = 0
    shuffle: bool = True
    split: Sequence[str] | None = None
    """For a model that is no `nn.Sequential`: the submodules that begin a new piece."""

    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Stepped once after every optimizer step."""

    clip_norm: float | None = None
    """The largest global gradient norm; larger ones are scaled to it."""

    clip_mode: ClipMode = ClipMode.SYNCHRONOUS
    """Synchronous waits for all stages before each update. Post-validated updates at once and
    takes the step back when the norm was too large: faster when it rarely is."""

    metrics: Mapping[str, Scorer] = field(default_factory=dict)
    """Named like the loss, and means like it; computed on the last stage."""

    device: str = "cpu"
    """Where stages compute. "cuda": the devices of a machine are dealt out in turn to its workers,
    so start as many workers as it has."""

    backend: Literal["gloo", "nccl"] | None = None
    """What sums the gradients of a stage's workers. None: NCCL where each worker has a CUDA device
    of its own; otherwise gloo, by way of the host."""

    precision: Literal["bf16"] | None = None
    """bf16: forward and backward under autocast, parameters and updates in fp32."""

    in_flight: int | Sequence[int] | None = None
    """Micro-batches a worker may hold between F and W, for all stages or for each. None: no limit,
    the fastest plan."""

    checkpoint: Checkpoints | None = None
    """Where and when it is saved; a job that is started again goes on from the newest. None: never,
    and a stage that loses its last worker ends the job."""

    log: Logging | None = None
    """Keeps what passes between stages, so that a stage that loses its last worker is rebuilt while
    the others wait with theirs. With replicas it is off unless it says `with_replicas`."""

    keep: Keep = Keep.NOTHING
    """What is copied at each step for an optimizer whose step cannot be taken back without."""

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise ConfigError(name, _kind(getattr(self, name)), "must be a function")
        if isinstance(self.model, nn.Module):
            raise ConfigError(
                "model", _kind(self.model), "must be a function that builds it, such as a lambda"
            )
        for name in ("batch_size", "microbatches"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "must be a whole number, at least 1")
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            rule = "must be map-style: len(dataset) and dataset[i] -> (input, target)"
            raise ConfigError("dataset", _kind(self.dataset), rule)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError("clip_norm", self.clip_norm, "must be above 0")
        # Plain strings will do, too.
        for name, choices in (("clip_mode", ClipMode), ("keep", Keep)):
            object.__setattr__(self, name, _chosen(name, getattr(self, name), choices))
        if self.precision not in (None, "bf16"):
            raise ConfigError("precision", self.precision, "must be None or 'bf16'")
        self._check_device()

    def _check_device(self) -> None:
        kind = self.device.partition(":")[0] if isinstance(self.device, str) else None
        if kind not in ("cpu", "cuda"):
            raise ConfigError("device", self.device, "must be 'cpu', 'cuda' or, say, 'cuda:1'")
        if self.backend not in (None, "gloo", "nccl"):
            raise ConfigError("backend", self.backend, "must be None, 'gloo' or 'nccl'")
        if self.backend == "nccl" and kind != "cuda":
            raise ConfigError("backend", self.backend, "works for device='cuda' only")

    def in_flight_limits(self, num_stages: int) -> tuple[int, ...] | None:
        if self.in_flight is None or isinstance(self.in_flight, int):
            return None if self.in_flight is None else (self.in_flight,) * num_stages
        if len(self.in_flight) != num_stages:
            raise ConfigError(
                "in_flight", list(self.in_flight), f"must have one number per stage ({num_stages})"
            )
        return tuple(self.in_flight)


def _chosen(name: str, value: str, choices: type[StrEnum]) -> StrEnum:
    try:
        return choices(value)
    except ValueError:
        raise ConfigError(name, value, f"must be {' or '.join(choices)}") from None


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def check_shape(job: Job, *, replicas: int) -> None:
    """What can only be said when the number of replicas is known."""
    num_slices = replicas * job.microbatches
    if job.batch_size % num_slices:
        nearest = max(1, round(job.batch_size / num_slices)) * num_slices
        raise ConfigError(
            "batch_size",
            job.batch_size,
            f"must be a multiple of {num_slices} ({replicas} replicas x {job.microbatches}"
            f" micro-batches), such as {nearest}",
        )
    if len(job.dataset) < job.batch_size:
        raise ConfigError(
            "dataset",
            f"{len(job.dataset)} samples long",
            f"must hold at least one batch of {job.batch_size}",
        )


def check_optimizer(job: Job, optimizer: Optimizer) -> None:
    """Whoever is a step ahead after a failure must be able to go back."""
    if job.keep is not Keep.NOTHING:
        return
    match check_undoable(optimizer):
        case NotUndoable(optimizer=name, reason=reason):
            raise ConfigError(
                "optimizer",
                name,
                f"its step cannot be undone: {reason}; give the job keep=everstep.Keep.MISSING,"
                " which copies at each step what is needed",
            )
        case _:
            pass


def digest(job: Job, stages: Sequence[StageModule], *, backend: str) -> str:
    """Of what must be the same on all workers and is not said to the coordinator otherwise."""
    settings: dict[str, Any] = {
        "stages": [
            [(name, tuple(t.shape), str(t.dtype)) for name, t in stage.state_dict().items()]
            for stage in stages
        ],
        "shuffle": job.shuffle,
        "samples": len(job.dataset),
        "metrics": list(job.metrics),
        "precision": job.precision,
        "device": torch.device(job.device).type,
        "backend": backend,
        "split": None if job.split is None else list(job.split),
        "torch": torch.__version__.partition("+")[0],
    }
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
