"""The settings of ReCycle's evaluation as a grid, and everstep's ratio to Oobleck and Bamboo there.

    32 workers           one node lost every 6 h, 2 h, 30 min, for a day or until half are gone;
                         the GCP A100 trace
    256 to 1,536 devices 1 %, 5 %, 10 % of the nodes lost

How many micro-batches a replica has decides how much there is to gain, so it is a dimension of its
own: 1, 2, 4 or 8 times the number of stages. Shapes are ours where the paper's are not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from everstep.sim.generate import at_once, monotone
from everstep.sim.job import Job
from everstep.sim.model import PRESETS, describe
from everstep.sim.read_trace import read_trace
from everstep.sim.results import Outcome, simulate
from everstep.sim.setting import Failures, Setting
from everstep.sim.trace import DAY_S, HOUR_S, Trace, fit

COMPARED = ("everstep", "oobleck", "bamboo")
SMALL = (("gpt-350m", 16, 2), ("gpt-1.3b", 8, 4), ("gpt-2.7b", 8, 4), ("gpt-6.7b", 4, 8))
"""Preset, replicas, stages: 32 workers of one device."""

LARGE = (("gpt-18.4b", 32, 8, 1), ("gpt-39b", 32, 16, 1), ("gpt-145.6b", 24, 8, 8))
"""Preset, replicas, stages, devices per worker: 256, 512 and 1,536 devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    model: str
    shape: str
    failures: str
    everstep: Outcome
    oobleck: Outcome
    bamboo: Outcome

    def ratio(self, other: str) -> float | None:
        """Of average throughputs; None where the other does not fit or gets nowhere."""
        theirs = self._other(other).throughput
        return self.everstep.throughput / theirs if theirs else None

    def fault_free_ratio(self, other: str) -> float | None:
        """What of it is there without any failure."""
        theirs = self._other(other).fault_free_throughput
        return self.everstep.fault_free_throughput / theirs if theirs else None

    def _other(self, name: str) -> Outcome:
        return {"oobleck": self.oobleck, "bamboo": self.bamboo}[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    best: float
    median: float
    worst: float
    num_cells: int


def spread(ratios: Sequence[float | None]) -> Spread | None:
    known = sorted(ratio for ratio in ratios if ratio is not None)
    if not known:
        return None
    return Spread(best=known[-1], median=median(known), worst=known[0], num_cells=len(known))


def settings(gcp: Path | None, *, seed: int) -> Iterator[tuple[Job, Trace]]:
    """Every cell's job and trace. Without the GCP file its cells are left out."""
    for name, replicas, stages in SMALL:
        for factor in (1, 2, 4, 8):
            job = _job(name, replicas, stages, 1, factor)
            for hours in (6.0, 2.0, 0.5):
                yield (
                    job,
                    monotone(
                        every_s=hours * HOUR_S,
                        num_nodes=job.num_workers,
                        duration_s=DAY_S,
                        seed=seed,
                    ),
                )
            if gcp is not None:
                yield job, fit(read_trace(gcp, seed=seed), job.num_workers, seed=seed)
    for name, replicas, stages, devices in LARGE:
        for factor in (1, 2, 4):
            job = _job(name, replicas, stages, devices, factor)
            for fraction in (0.01, 0.05, 0.10):
                yield (
                    job,
                    at_once(fraction, num_nodes=job.num_workers, duration_s=DAY_S, seed=seed),
                )


def _job(name: str, replicas: int, stages: int, devices: int, factor: int) -> Job:
    return describe(
        PRESETS[name].model,
        name=name,
        replicas=replicas,
        stages=stages,
        microbatches=factor * stages,
        tensor_parallel=devices,
    )


def evaluate(
    gcp: Path | None, *, seed: int = 0, on_cell: Callable[[Cell], None] | None = None
) -> list[Cell]:
    cells = []
    for job, trace in settings(gcp, seed=seed):
        setting = Setting(job=job, failures=Failures.of(trace))
        everstep, oobleck, bamboo = simulate(trace, setting, systems=COMPARED)
        cell = Cell(
            model=job.name,
            shape=f"{job.replicas} x {job.stages} x {job.microbatches}",
            failures=trace.name,
            everstep=everstep,
            oobleck=oobleck,
            bamboo=bamboo,
        )
        cells.append(cell)
        if on_cell is not None:
            on_cell(cell)
    return cells
