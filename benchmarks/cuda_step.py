"""A step on a CUDA device: one worker of everstep beside a plain PyTorch loop, in turns.

    python benchmarks/cuda_step.py [--width 1024] [--blocks 16] [--turns 6]

The same GPT, data and optimizer in one process; each turn is a few steps of the one, then of the
other. Exits 1 when everstep's step takes more than 1.05 of the plain one, 2 without a device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import chain, repeat
from statistics import median

import torch
from torch.utils.data import DataLoader

import everstep
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss

MOST_STEP_RATIO = 1.05

STEPS_PER_TURN = 10
WARM_UP = 5
LENGTH, BATCH_SIZE, MICROBATCHES = 256, 32, 4


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    return char_gpt(width=options.width, blocks=options.blocks, length=LENGTH)


def make_optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4)  # type: ignore[arg-type]


class Plain:
    """Gradients are added up over the micro-batches, as everstep does."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = make_model(options).cuda()
        self._optimizer = make_optimizer(self.model.parameters())
        self._batches = chain.from_iterable(
            repeat(
                DataLoader(
                    Characters(length=LENGTH),  # type: ignore[arg-type]
                    batch_size=BATCH_SIZE // MICROBATCHES,
                    shuffle=True,
                    pin_memory=True,
                    drop_last=True,
                )
            )
        )

    def step(self) -> None:
        for _ in range(MICROBATCHES):
            given, target = (each.cuda(non_blocking=True) for each in next(self._batches))
            loss = next_character_loss(self.model(given), target) / MICROBATCHES
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def turn_s(step: Callable[[], object]) -> float:
    """Of one step."""
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) / STEPS_PER_TURN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no CUDA device here")
        return 2
    job = everstep.Job(
        model=lambda: make_model(options),
        loss=next_character_loss,
        optimizer=make_optimizer,
        dataset=Characters(length=LENGTH),
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
        device="cuda",
    )
    run = everstep.train(job, steps=WARM_UP + options.turns * STEPS_PER_TURN)
    plain = Plain(options)
    for _ in range(WARM_UP):
        next(run)
        plain.step()
    ours, theirs = [], []
    for number in range(options.turns):
        ours.append(turn_s(lambda: next(run)))
        theirs.append(turn_s(plain.step))
        print(f"turn {number}: {ours[-1]:.4f} s, plain {theirs[-1]:.4f} s", file=sys.stderr)
    run.close()
    num_params = sum(param.numel() for param in plain.model.parameters())
    ratio = median(our_s / their_s for our_s, their_s in zip(ours, theirs, strict=True))
    is_met = ratio <= MOST_STEP_RATIO
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {num_params / 1e6:.0f} M"
        f" parameters: {median(ours):.4f} s a step, plain PyTorch {median(theirs):.4f} s"
    )
    print(f"step / plain step {ratio:>7.3f}   <= 1.05  {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
