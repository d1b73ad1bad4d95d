"""A job in bf16 with a slow dataset, which waits in its middle until a file says go.

Run by agents: while it waits, the tests look at it from outside.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import everstep
from equality_job import Points

STEPS = 14
WAITS_AFTER = 5
"""The measured plan is in force by then."""

SAMPLE_S = 0.004
GO_WITHIN_S = 60


class SlowPoints(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def job() -> everstep.Job:
    return everstep.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
        dataset=SlowPoints(8),
        batch_size=16,
        microbatches=2,
        precision="bf16",
    )


def wait_go(path: Path) -> None:
    deadline_s = time.monotonic() + GO_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} was not made in {GO_WITHIN_S} s")
        time.sleep(0.02)


def main(go: Path, out: Path) -> None:
    run = everstep.train(job(), steps=STEPS)
    for step in run:
        if step.index == WAITS_AFTER:
            wait_go(go)
    weights = run.state_dict()
    if run.is_reporter:
        torch.save(weights, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
