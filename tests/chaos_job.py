"""A job under faults: a small GPT with dropout and AdamW that plays a fault script.

Imported by the tests for the reference; run by `everstep run` as the script of a worker. At its end
each worker leaves a note in the folder: checksums of its state, what it has open.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import everstep
from everstep.comm.gloo import DESTROYING
from everstep.testing import faults
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss
from everstep.testing.faults import FaultScript

BATCH_SIZE = 36
MICROBATCHES = 3
SEED = 5
CLIP_NORM = 0.7
FAULT_LOG = "faults.log"

DATASET = Characters(length=16, last=300)
HELD_OUT = Characters(length=16, first=300, last=340)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a worker knows at its end."""

    place: str
    pid: int
    module: int
    optimizer: int
    weights: int | None
    """Of the whole model, on the reporter."""

    losses: dict[str, float | None]
    evaluations: dict[str, float]
    """The held-out loss after some steps."""

    resources: dict[str, list[int]]
    """Descriptors and threads: after this worker's first step, and after its last."""


def build() -> torch.nn.Module:
    return char_gpt(width=16, blocks=3, length=16)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def schedule(optimizer: Optimizer) -> LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)


def job(*, is_clipped: bool) -> everstep.Job:
    clipping: dict[str, Any] = {"clip_norm": CLIP_NORM, "clip_mode": "post-validated"}
    return everstep.Job(
        model=build,
        loss=next_character_loss,
        optimizer=adamw,
        dataset=DATASET,
        batch_size=BATCH_SIZE,
        microbatches=MICROBATCHES,
        seed=SEED,
        scheduler=schedule,
        **(clipping if is_clipped else {}),
    )


def checksum(value: Any) -> int:
    """Of every bit of a state dict."""
    found = 0
    stack = [value]
    while stack:
        match stack.pop():
            case Tensor() as tensor:
                found = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), found)
            case dict() as mapping:
                stack += [item for pair in mapping.items() for item in pair]
            case list() | tuple() as items:
                stack += items
            case plain:
                found = zlib.crc32(repr(plain).encode(), found)
    return found


def resources() -> list[int]:
    """Descriptors, threads, and groups that gloo has not let go of."""
    num_stuck = sum(thread.name == DESTROYING for thread in threading.enumerate())
    return [len(os.listdir("/proc/self/fd")), threading.active_count(), num_stuck]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--faults", default="")
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--clipped", action="store_true")
    parser.add_argument("--wait-for", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    faults.install(FaultScript.parse(options.faults), log=options.folder / FAULT_LOG)
    run = everstep.train(job(is_clipped=options.clipped), steps=options.steps)
    losses: dict[str, float | None] = {}
    evaluations: dict[str, float] = {}
    used: dict[str, list[int]] = {}
    for step in run:
        losses[str(step.index)] = step.loss
        used.setdefault("first", resources())
        if options.evaluate_every and step.index % options.evaluate_every == 0:
            evaluations[str(step.index)] = run.evaluate(HELD_OUT)["loss"]
        time.sleep(options.pause)
        if len(run._orders.members) < options.wait_for:
            time.sleep(0.1)  # so that replacements come back within a few steps, not after them
    used["last"] = resources()
    weights = run.state_dict()
    state = run._holding.state()
    assert state.optimizer is not None
    note = Note(
        place=str(run._holding.me),
        pid=os.getpid(),
        module=checksum(state.module.state_dict()),
        optimizer=checksum(state.optimizer.state_dict()),
        weights=checksum(weights) if run.is_reporter else None,
        losses=losses,
        evaluations=evaluations,
        resources=used,
    )
    (options.folder / f"{note.pid}.note").write_text(json.dumps(asdict(note)))


if __name__ == "__main__":
    main()
