"""A job whose loop is left before its last step. Run by `everstep run`."""

from __future__ import annotations

import sys

import everstep
from bad_job import good

LAST = 6

if __name__ == "__main__":
    run = everstep.train(good(), steps=1000)
    for step in run:
        if step.index == LAST:
            break
    sys.stdout.write(f"{len(run.state_dict())} tensors after the break\n")
