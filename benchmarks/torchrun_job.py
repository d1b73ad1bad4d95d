"""The other side of recovery.py: 12 processes under torchrun, a checkpoint after every step.

A step is an emulated 0.2 s of work and a reduction. Appends "wall-clock step" lines to a file.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(steps: int, step_s: float, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    weights = torch.zeros(1 << 16)
    checkpoint = folder / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        weights, first = saved["weights"], saved["step"] + 1
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    for step in range(first, steps):
        time.sleep(step_s)
        gradient = torch.full_like(weights, 1e-3)
        dist.all_reduce(gradient)
        weights += gradient
        if dist.get_rank() == 0:
            part = folder / "checkpoint.part"
            torch.save({"weights": weights, "step": step}, part)
            part.rename(checkpoint)
            with (folder / "steps").open("a") as log:
                log.write(f"{time.time()} {step}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
