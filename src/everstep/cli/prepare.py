"""`everstep plan --prepare N`: plans for every set of up to N losses, made ahead."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import track

from everstep.core.errors import ConfigError
from everstep.schedule.planner import Effort
from everstep.schedule.problem import Problem
from everstep.schedule.store import PlanStore, losses_to_prepare


def prepare_plans(problem: Problem, effort: Effort, *, at_most: int, out: Path | None) -> None:
    if out is None:
        raise ConfigError("--out", "missing", "--prepare needs a directory to write to")
    if problem.lost:
        raise ConfigError("--lost", "given", "--prepare plans for all losses; leave it out")
    try:
        store = PlanStore(out, effort=effort)
    except OSError as error:
        raise ConfigError("--out", out, error.strerror or str(error)) from None
    wanted = list(losses_to_prepare(problem, at_most=at_most))
    longest = 0.0
    for question in track(wanted, "planning", console=Console(stderr=True), transient=True):
        longest = max(longest, store.plan(question).period)
    print(
        f"{len(wanted)} plans in {out} cover every loss of up to {at_most} workers"
        f" (replicas are interchangeable); longest period {longest:g}"
    )
