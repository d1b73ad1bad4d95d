"""A job whose user code raises, at the place that is its argument. Run by `everstep run`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import everstep
from equality_job import Points

PLACES = ("before training", "between steps", "after training", "in the model", "in the dataset")


class Broken(Exception):
    pass


class BrokenPoints(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 37:
            raise Broken("in the dataset")
        return super().__getitem__(index)


class BreaksLater(nn.Module):
    """Every worker of its stage raises, at about the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 5:
            raise Broken("in the model")
        return x


def job(where: str) -> everstep.Job:
    last = BreaksLater if where == "in the model" else nn.Identity
    return everstep.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), last()),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        dataset=BrokenPoints(8) if where == "in the dataset" else Points(8),
        batch_size=16,
        microbatches=2,
    )


def main(where: str) -> None:
    if where == "before training":
        raise Broken(where)
    for step in everstep.train(job(where), steps=20):
        if where == "between steps" and step.index == 3:
            raise Broken(where)
    if where == "after training":
        raise Broken(where)


if __name__ == "__main__":
    main(sys.argv[1])
