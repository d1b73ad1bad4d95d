"""A model that is no Sequential, cut by names, with several tensors between its stages.

Run by `everstep run`; imported by the tests for the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import everstep

STEPS = 8
BATCH_SIZE = 16
MICROBATCHES = 2
SPLIT = ["layers.1", "layers.2"]

LENGTH, WORDS, WIDTH = 6, 20, 12


class Sentences:
    """Token ids with an integer mask: 1 where there is a word."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(WORDS, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) <= index % LENGTH).long()
        return {"mask": mask, "ids": ids}, (ids * mask).sum() % 3


class Reader(nn.Module):
    """Later layers read the mask and the embedding: three tensors go from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        embedded = x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask.unsqueeze(-1)
        scores: Tensor = self.head(((x + embedded) * mask.unsqueeze(-1)).sum(1))
        return scores


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def job() -> everstep.Job:
    return everstep.Job(
        model=Reader,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        dataset=Sentences(),
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
        split=SPLIT,
    )


def main(out: Path) -> None:
    run = everstep.train(job(), steps=STEPS)
    losses = [step.loss for step in run]
    evaluation, weights = run.evaluate(Sentences()), run.state_dict()
    if run.is_reporter:
        torch.save({"losses": losses, "weights": weights, "evaluation": evaluation}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
