"""Simulations on a terminal: a table, and underneath how the numbers came about."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from everstep.sim.confidence import Confidence
from everstep.sim.reports import LEGEND, duration, recoveries, table
from everstep.sim.results import Outcome
from everstep.sim.setting import Setting
from everstep.sim.trace import Trace


def print_outcomes(outcomes: Sequence[Outcome], trace: Trace, setting: Setting) -> None:
    print(summary(trace, setting))
    print()
    print_columns(table(outcomes))
    print(f"\n{LEGEND}")
    print_money(outcomes)
    print("\nrecoveries by rung (docs/simulator.md says what each is):")
    for outcome in outcomes:
        if outcome.rungs:
            print(f"  {outcome.system}: {recoveries(outcome)}")
    for outcome in outcomes:
        print_quality(outcome)


def summary(trace: Trace, setting: Setting) -> str:
    job = setting.job
    devices = "" if job.devices_per_worker == 1 else f" of {job.devices_per_worker} devices"
    return (
        f"{job.name}: {job.replicas} replicas x {job.stages} stages x {job.microbatches}"
        f" micro-batches, {job.num_workers} workers{devices} on {setting.nodes} nodes\n"
        f"{trace.name}: {duration(trace.duration_s)}, {trace.num_losses} losses of nodes, "
        f"{duration(trace.mean_outage_s())} each; throughput in samples per second"
    )


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """The first and the last column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        print("  ".join([*cells, row[-1]]).rstrip())


def print_quality(outcome: Outcome) -> None:
    """Only where the planner's bound stands in for a plan."""
    quality = outcome.periods
    if quality is None or not quality.num_bounded:
        return
    print(
        f"\n{outcome.system}: step times of {quality.num_planned} patterns of losses were planned;"
        f" {quality.num_bounded} more are the planner's lower bound + {quality.mean_gap:.1%}, by"
        f" which those planned lay above theirs (at most {quality.worst_gap:.1%})"
    )


def print_money(outcomes: Sequence[Outcome]) -> None:
    if outcomes[0].money is None:
        return
    print(
        f"per million: the price of a million samples; {outcomes[0].device_hours:,.0f} device hours"
        f" were up and cost {outcomes[0].money:,.2f}"
    )


def print_confidence(rows: Sequence[Confidence], runs: int) -> None:
    first = rows[0].system
    print(f"means over {runs} traces with 95 % intervals; throughput in samples per second\n")
    header = ("system", "average", "useful", "steps lost", f"{first} is so many times as fast")
    print_columns(
        [
            header,
            *(
                (
                    row.system,
                    str(row.throughput),
                    row.useful_fraction.as_percent(),
                    str(row.steps_lost),
                    str(row.ratio),
                )
                for row in rows
            ),
        ]
    )


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere; gone when all is done."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    # Imported here, because it takes a good part of the command's start.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda: bar.advance(task)
