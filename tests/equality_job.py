"""The jobs whose losses must equal plain PyTorch's: an MLP, a small GPT with dropout, a conv net.

Imported by the tests for the reference; run by `everstep run` as the script of a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import everstep
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss
from everstep.testing.reference import Reference, plain_training

SEED = 5
STEPS = 30
BATCH_SIZE = 36
MICROBATCHES = 3


class Points:
    """Samples that are a function of their number."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(*self._shape, generator=generator)
        return point, (point.sum() > 0).long()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 24), nn.Tanh()),
        nn.Linear(24, 24),
        nn.ReLU(inplace=True),
        nn.Linear(24, 16),
        nn.Tanh(),
        nn.Linear(16, 2),
    )


def conv_net() -> nn.Module:
    return nn.Sequential(
        # No bias before a norm: its gradient is rounding noise, which Adam would blow up.
        nn.Conv2d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 2),
    )


def gpt() -> nn.Module:
    return char_gpt(width=16, blocks=3, length=16)


Parameters = Iterable[nn.Parameter]

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "mlp": (mlp, nn.functional.cross_entropy, Points(8)),
    "gpt": (gpt, next_character_loss, Characters(length=16, last=300)),
    "conv": (conv_net, nn.functional.cross_entropy, Points(1, 8, 8)),
}

OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3),
}


def scheduler(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)


def plain(
    model: str,
    optimizer: str,
    *,
    replicas: int,
    stages: int,
    steps: int = STEPS,
    clip_norm: float | None = None,
) -> Reference:
    """What `job` must come to, by plain PyTorch."""
    build, loss, dataset = MODELS[model]
    return plain_training(
        build,
        loss,
        OPTIMIZERS[optimizer],
        dataset,
        batch_size=BATCH_SIZE,
        replicas=replicas,
        microbatches=MICROBATCHES,
        num_stages=stages,
        steps=steps,
        seed=SEED,
        clip_norm=clip_norm,
        scheduler=scheduler,
    )


def job(model: str, optimizer: str, clip: str) -> everstep.Job:
    """`clip` is `none`, or a mode and a norm such as `post-validated:0.5`."""
    build, loss, dataset = MODELS[model]
    mode, _, norm = clip.partition(":")
    clipping: dict[str, Any] = {"clip_norm": float(norm), "clip_mode": mode} if norm else {}
    return everstep.Job(
        model=build,
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        dataset=dataset,
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
        seed=SEED,
        scheduler=scheduler,
        **clipping,
    )


def main(model: str, optimizer: str, clip: str, out: str) -> None:
    run = everstep.train(job(model, optimizer, clip), steps=STEPS)
    losses = [step.loss for step in run]
    weights = run.state_dict()
    if run.is_reporter:
        torch.save({"losses": losses, "weights": weights}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
