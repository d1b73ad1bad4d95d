"""Jobs that must be refused, by name. Run by `everstep run` with the name as its argument."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import everstep
from equality_job import Points


class Forked(nn.Module):
    """Not a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.left(x) + self.right(x)
        return both


class Grows(nn.Module):
    """Its output is one wider at every call of a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.cat([x, x.new_zeros(len(x), self.num_calls)], dim=1)


class Narrow(nn.Linear):
    """Takes any width, and most of the time: so it is a stage of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : self.in_features])


def tied() -> nn.Module:
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def growing() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), Grows(), Narrow(64, 256))


def good(**changes: Any) -> everstep.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "dataset": Points(8),
        "batch_size": 16,
        "microbatches": 2,
    }
    return everstep.Job(**(settings | changes))


BAD_JOBS: dict[str, Callable[[], everstep.Job]] = {
    "indivisible": lambda: good(batch_size=18),
    "few layers": lambda: good(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))),
    "short dataset": lambda: good(batch_size=204),
    "amsgrad": lambda: good(optimizer=lambda params: torch.optim.AdamW(params, amsgrad=True)),
    "no split": lambda: good(model=Forked),
    "tied": lambda: good(model=tied),
    "growing": lambda: good(model=growing),
    "no microbatches": lambda: good(microbatches=0),
    "module": lambda: good(model=nn.Linear(8, 2)),
}

if __name__ == "__main__":
    for _ in everstep.train(BAD_JOBS[sys.argv[1]](), steps=5):
        pass
