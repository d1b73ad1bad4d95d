"""The script that emulated-device benchmarks run on every worker.

Run by `everstep run`: REPLICAS STAGES MICROBATCHES STEPS F B W [--in-flight N], times in seconds.
"""

from __future__ import annotations

import argparse

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for number in ("replicas", "stages", "microbatches", "steps"):
        parser.add_argument(number, type=int)
    parser.add_argument("times", type=float, nargs=3, metavar=("F", "B", "W"))
    parser.add_argument("--in-flight", type=int, help="micro-batches a worker may hold")
    args = parser.parse_args()
    job = everstep.Job(
        model=lambda: emulated_model(args.stages, *args.times),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        dataset=Nothing(),
        batch_size=args.replicas * args.microbatches,
        microbatches=args.microbatches,
        in_flight=args.in_flight,
    )
    for _ in everstep.train(job, steps=args.steps):
        pass


if __name__ == "__main__":
    main()
