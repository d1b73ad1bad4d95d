"""Which device a worker computes on, and what its groups are made of."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from everstep.core.errors import ConfigError
from everstep.launch.context import WorkerContext
from everstep.training.job import Job

Backend: TypeAlias = Literal["gloo", "nccl"]


def take_device(job: Job, context: WorkerContext | None) -> torch.device:
    """This worker's. CUDA devices are dealt out in turn to the workers of a machine."""
    device = torch.device(job.device)
    if device.type == "cpu":
        return device
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise ConfigError("device", job.device, "torch finds no CUDA device on this machine")
    if device.index is None:
        number = 0 if context is None else context.local_number
        device = torch.device("cuda", number % num_devices)
    elif device.index >= num_devices:
        raise ConfigError("device", job.device, f"this machine has {num_devices}, counted from 0")
    torch.cuda.set_device(device)
    return device


def choose_backend(job: Job, context: WorkerContext) -> Backend:
    """NCCL wants a device for each worker. Shared ones are summed by way of the host."""
    if job.backend is not None:
        return job.backend
    device = torch.device(job.device)
    has_own = device.index is None and context.num_local <= torch.cuda.device_count()
    return "nccl" if device.type == "cuda" and has_own else "gloo"
