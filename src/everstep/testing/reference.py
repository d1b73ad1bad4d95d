"""Plain PyTorch training over the same samples, with the same randomness: what everstep must equal.

One process, one loop, autograd from the loss to the input. Shares with the real thing only the
cut into stages (for the keys of the randomness), the sample order and the seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from everstep.execute.data import Dataset, Microbatch, SampleOrder, Slicing
from everstep.execute.randomness import seed_for
from everstep.execute.split import StageModule, split_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    losses: list[float]
    """One per step: the mean over the whole batch."""

    state_dict: dict[str, Tensor]
    """The whole model's, after the last step."""


def plain_training(
    build_model: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    dataset: Dataset,
    *,
    batch_size: int,
    replicas: int = 1,
    microbatches: int = 1,
    num_stages: int = 1,
    steps: int,
    seed: int = 0,
    shuffle: bool = True,
    clip_norm: float | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    split: Sequence[str] | None = None,
) -> Reference:
    """Trains for `steps` and leaves torch's random state as it found it."""
    order = SampleOrder(num_samples=len(dataset), batch_size=batch_size, seed=seed, shuffle=shuffle)
    slicing = Slicing(order=order, replicas=replicas, microbatches=microbatches)
    num_slices = replicas * microbatches
    losses: list[float] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model()
        example, _ = _batch(dataset, slicing.samples(Microbatch(0, 0, 0)))
        stages = split_model(model, num_stages=num_stages, example=example, split=split)
        params = [param for stage in stages for param in stage.module.parameters()]
        stepper = optimizer(params)
        schedule = scheduler(stepper) if scheduler is not None else None
        for step in range(steps):
            stepper.zero_grad()
            total = 0.0
            for replica, number in itertools.product(range(replicas), range(microbatches)):
                inputs, target = _batch(dataset, slicing.samples(Microbatch(step, replica, number)))
                output = _forward(stages, inputs, key=(seed, step, replica, number))
                found = loss(output, target)
                (found / num_slices).backward()  # type: ignore[no-untyped-call]
                total += found.item()
            losses.append(total / num_slices)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(params, clip_norm)
            stepper.step()
            if schedule is not None:
                schedule.step()
    state = {key: value.clone() for stage in stages for key, value in stage.state_dict().items()}
    return Reference(losses=losses, state_dict=state)


def _batch(dataset: Dataset, samples: Sequence[int]) -> tuple[Any, Any]:
    inputs, targets = zip(*(dataset[index] for index in samples), strict=True)
    return default_collate(list(inputs)), default_collate(list(targets))


def _forward(stages: Sequence[StageModule], value: Any, *, key: tuple[int, int, int, int]) -> Any:
    for index, stage in enumerate(stages):
        torch.manual_seed(seed_for(*key, index))
        value = stage.call(value)
    return value
