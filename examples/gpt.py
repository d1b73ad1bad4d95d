"""Shows: a GPT on replicas x stages of workers that goes on when some of them are killed.

Run:   everstep run --replicas 2 --stages 2 examples/gpt.py --steps 50
       everstep run --replicas 2 --stages 2 --kill 1:1@20 examples/gpt.py --steps 50
       everstep run --replicas 2 --stages 4 examples/gpt.py --device cuda --width 1024 --blocks 16

A character model of Python's own library. `python examples/gpt.py` trains it with one worker.
Prints the loss now and then, on one live worker, and at the end that on text it has not seen.
"""

from __future__ import annotations

import argparse

import torch

import everstep
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss

HELD_OUT = 256
"""Windows of the text."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="cuda: one for each worker of a machine.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=4)
    options = parser.parse_args()

    job = everstep.Job(
        model=lambda: char_gpt(width=options.width, blocks=options.blocks, length=options.length),
        loss=next_character_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        dataset=Characters(length=options.length, first=HELD_OUT),
        batch_size=options.batch_size,
        microbatches=options.microbatches,
        device=options.device,
    )
    run = everstep.train(job, steps=options.steps)
    for step in run:
        if step.is_reporter and step.index % 10 == 9:
            print(f"step {step.index + 1:5}  loss {step.loss:.3f}  {step.seconds:.3f} s")
    held_out = run.evaluate(Characters(length=options.length, last=HELD_OUT))
    if run.is_reporter:
        print(f"loss on text it has not seen: {held_out['loss']:.3f}")


if __name__ == "__main__":
    main()
