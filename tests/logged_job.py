"""A job that logs: MODEL DIRECTORY STEPS EVERY HELPERS OUT. HELPERS: a number, or `all`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

import everstep
from equality_job import job
from everstep.checkpoint.baselines import EverySteps


def main(model: str, directory: str, steps: str, every: str, helpers: str, out: str) -> None:
    folder = Path(directory)
    saving = everstep.Checkpoints(directory=folder / "ckpt", policy=EverySteps(int(every)))
    num_helpers = None if helpers == "all" else int(helpers)
    logging = everstep.Logging(budget="1GB", directory=folder / "log", helpers=num_helpers)
    logged = replace(job(model, "adamw", "none"), checkpoint=saving, log=logging)
    run = everstep.train(logged, steps=int(steps))
    indices = [step.index for step in run]
    weights = run.state_dict()
    if run.is_reporter:
        torch.save({"indices": indices, "weights": weights}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
