"""A job that trains until it is told to stop. Run by `everstep run`."""

from __future__ import annotations

import everstep
from bad_job import good

if __name__ == "__main__":
    for _ in everstep.train(good(), steps=1_000_000):
        pass
