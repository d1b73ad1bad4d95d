"""A job with checkpoints. Run with everstep or alone: MODEL DIRECTORY STEPS EVERY PAUSE OUT."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch

import everstep
from equality_job import job
from everstep.checkpoint.baselines import EverySteps


def main(model: str, directory: str, steps: str, every: str, pause: str, out: str) -> None:
    saving = everstep.Checkpoints(directory=directory, policy=EverySteps(int(every)))
    saved = replace(job(model, "adamw", "none"), checkpoint=saving)
    run = everstep.train(saved, steps=int(steps))
    indices = []
    for step in run:
        indices.append(step.index)
        time.sleep(float(pause))
    weights = run.state_dict()
    if run.is_reporter:
        torch.save({"indices": indices, "weights": weights}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
