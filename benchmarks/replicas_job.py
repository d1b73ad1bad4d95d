"""A real model on the processor, for one stage and several replicas: everstep's side.

Run by `everstep run`: MICROBATCHES STEPS. The other side, ddp_job.py, trains the same job.
"""

from __future__ import annotations

import sys

import torch

import everstep
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss

REPLICAS = 2
SAMPLES_PER_REPLICA = 8
LENGTH = 64


def make_job(microbatches: int) -> everstep.Job:
    """3.2 million parameters, 0.1 to 0.2 s a step. No dropout, so that the losses of both sides
    can be compared."""
    return everstep.Job(
        model=lambda: char_gpt(width=256, blocks=4, length=LENGTH, dropout=0.0),
        loss=next_character_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        dataset=Characters(length=LENGTH),
        batch_size=REPLICAS * SAMPLES_PER_REPLICA,
        microbatches=microbatches,
    )


def main(microbatches: int, steps: int) -> None:
    for _ in everstep.train(make_job(microbatches), steps=steps):
        pass


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
