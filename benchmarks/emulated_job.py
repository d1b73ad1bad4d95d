"""The script that emulated-device benchmarks run on every worker.

Run by `everstep run`: F B W in seconds, micro-batches, steps.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import everstep
from everstep.testing.emulate import emulated_model


class Nothing:
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), float(index % 7)), torch.zeros(8)


def main(replicas: int, stages: int, microbatches: int, steps: int, times: list[float]) -> None:
    job = everstep.Job(
        model=lambda: emulated_model(stages, *times),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        dataset=Nothing(),
        batch_size=replicas * microbatches,
        microbatches=microbatches,
    )
    for _ in everstep.train(job, steps=steps):
        pass


if __name__ == "__main__":
    shape, times = sys.argv[1:5], sys.argv[5:8]
    main(*map(int, shape), [float(seconds) for seconds in times])
