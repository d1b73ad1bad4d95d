"""`everstep demo`: the planner at work on 3 replicas x 4 stages x 6 micro-batches."""

from __future__ import annotations

import typer

from everstep.cli.print_plan import print_grid
from everstep.core.ids import WorkerId
from everstep.schedule.durations import Durations
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem

LOSSES = {
    "Nobody is lost": [],
    "One worker is lost: the others take its micro-batches into their idle time": [(1, 2)],
    "Three workers are lost, each of another stage": [(1, 2), (0, 1), (2, 3)],
}


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command() -> None:
    """Three plans for one job: nobody lost, one worker lost, three workers lost."""
    for headline, lost in LOSSES.items():
        problem = Problem(
            replicas=3,
            stages=4,
            microbatches=6,
            lost=frozenset(WorkerId(*place) for place in lost),
            durations=Durations.uniform(4),
        )
        print(f"== {headline}\n")
        print_grid(plan(problem, Effort(improve_s=1.0)))
        print()
