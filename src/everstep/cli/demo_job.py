"""The script of `everstep demo`: a small character-level GPT on Python's own sources.

What a user's train.py looks like; run by the demo on every worker.
"""

from __future__ import annotations

import sys

import torch

import everstep
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss


def main(steps: int) -> None:
    job = everstep.Job(
        model=lambda: char_gpt(width=48, blocks=6, length=48),
        loss=next_character_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        dataset=Characters(length=48, first=200),
        batch_size=72,
        microbatches=6,
        metrics={"accuracy": lambda output, target: (output.argmax(-1) == target).float().mean()},
    )
    run = everstep.train(job, steps=steps)
    for _ in run:
        pass
    held_out = run.evaluate(Characters(length=48, last=192))
    if run.is_reporter:
        print(
            f"held-out loss {held_out['loss']:.3f}, next character right"
            f" {held_out['accuracy']:.1%} of the time"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
