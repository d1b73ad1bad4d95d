"""A job that evaluates between steps and afterwards; every worker writes down what it saw.

Run by `everstep run`, or alone with `python`; imported by the tests for the reference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import everstep
from equality_job import Points

STEPS = 7
BATCH_SIZE = 24
MICROBATCHES = 3

EVALUATED_AFTER = (1, 4)


class Some(Points):
    """The first few of them."""

    def __init__(self, length: int) -> None:
        super().__init__(8)
        self._length = length

    def __len__(self) -> int:
        return self._length


HELD_OUT = (Some(37), Some(3))
"""Neither is a multiple of anything; the second is shorter than a micro-batch."""


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def job() -> everstep.Job:
    return everstep.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        dataset=Points(8),
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
        metrics={"accuracy": accuracy},
        seed=3,
    )


def main(folder: Path) -> None:
    run = everstep.train(job(), steps=STEPS)
    seen: list[everstep.Step] = []
    evaluations: list[list[dict[str, float]]] = []
    for step in run:
        seen.append(step)
        sys.stdout.write(f"{os.getpid()} has ")
        sys.stdout.flush()
        sys.stdout.write(f"finished step {step.index}\n")
        if step.index in EVALUATED_AFTER:
            evaluations.append([run.evaluate(dataset) for dataset in HELD_OUT])
    weights = run.state_dict()
    evaluations.append([run.evaluate(dataset) for dataset in HELD_OUT])
    found = {
        "losses": [step.loss for step in seen],
        "metrics": [step.metrics for step in seen],
        "reports": {run.is_reporter, *(step.is_reporter for step in seen)},
        "weights": weights,
        "evaluations": evaluations,
    }
    torch.save(found, folder / f"{os.getpid()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
