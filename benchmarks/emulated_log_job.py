"""The script of logging_and_replay.py: one pipeline of emulated devices that saves and may log.

Run by `everstep run`. Each worker leaves what its log held at most in FOLDER/held-STAGE-PID.json.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import everstep
from everstep.checkpoint.baselines import CheckFreq, EverySteps
from everstep.checkpoint.policy import Policy
from everstep.execute.data import Microbatch
from everstep.recovery.log import LogReport
from everstep.testing.emulate import EmulatedLayer
from everstep.training.stage_log import StageLog
from log_turns import is_logged

FLOAT_BYTES = 4


class Samples:
    """Of the size of an activation, and the same tensor each time: they cost nothing."""

    def __init__(self, size: int) -> None:
        self._sample = torch.zeros(size)

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        del index
        return self._sample, self._sample


class HeavyLayer(EmulatedLayer):
    """Has a state like that of the large stage it stands for, which is saved, loaded and copied.
    Its training is in the times of F, B and W."""

    def __init__(self, slot_s: float, *, size: int, state_bytes: int) -> None:
        super().__init__(slot_s, slot_s, slot_s, size)
        # Untouched until it is saved or loaded: what a real model costs to initialise is left out.
        rest = torch.empty(state_bytes // FLOAT_BYTES)
        self.rest = nn.Parameter(rest, requires_grad=False)


def log_in_turns(length: int) -> None:
    """Some steps only, the same on all workers. Of the others the log does not even hear."""
    sent = StageLog.sent

    def sent_in_turns(log: StageLog, mb: Microbatch, *rest: Any) -> None:
        if is_logged(mb.step, length):
            sent(log, mb, *rest)

    StageLog.sent = sent_in_turns  # type: ignore[assignment, method-assign]


def main() -> None:
    args = _arguments()
    if args.log_turns is not None:
        log_in_turns(args.log_turns)
    size = args.message_bytes // FLOAT_BYTES
    folder = Path(args.folder)
    policy: Policy = CheckFreq() if args.every is None else EverySteps(args.every)
    job = everstep.Job(
        model=lambda: nn.Sequential(
            *(
                HeavyLayer(args.slot_s, size=size, state_bytes=args.state_bytes)
                for _ in range(args.stages)
            )
        ),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        dataset=Samples(size),
        batch_size=args.microbatches,
        microbatches=args.microbatches,
        checkpoint=everstep.Checkpoints(directory=folder / "checkpoints", policy=policy),
        log=None
        if args.log_memory is None
        else everstep.Logging(
            budget="100GB", directory=folder / "log", helpers=args.helpers, memory=args.log_memory
        ),
    )
    run = everstep.train(job, steps=args.steps)
    reports = [report for _ in run if (report := run.log_report()) is not None]
    if reports:
        held = folder / f"held-{os.getpid()}.json"
        held.write_text(json.dumps(_most(reports)))


def _most(reports: list[LogReport]) -> dict[str, int]:
    rows = [asdict(report) for report in reports]
    names = ("recorded_bytes", "memory_bytes", "disk_bytes", "dropped_steps")
    return {name: max(row[name] for row in rows) for name in names}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    for number in ("stages", "microbatches", "steps"):
        parser.add_argument(number, type=int)
    parser.add_argument("slot_s", type=float, help="of F, of B and of W")
    parser.add_argument("--message-bytes", type=int, required=True)
    parser.add_argument("--state-bytes", type=int, default=0, help="of a stage, beside its layer")
    parser.add_argument("--every", type=int, help="steps between checkpoints, else as CheckFreq")
    parser.add_argument("--log-memory", help="of each worker; nothing is logged without")
    parser.add_argument("--log-turns", type=int, help="log only so many steps at a time")
    parser.add_argument("--helpers", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
