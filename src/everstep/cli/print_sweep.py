"""Sweeps, validations and the evaluation grid on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.cli.print_simulation import print_columns
from everstep.sim.evaluation import Cell, spread
from everstep.sim.sweep import Row
from everstep.sim.validate import BAR_FRACTION, Validation

PUBLISHED = {"oobleck": 1.46, "bamboo": 1.64}
"""The most that ReCycle reports (arXiv 2405.14009)."""


def print_sweep(rows: Sequence[Row], more: Row, *, samples: float, price: float) -> None:
    header = ("layout", "size", "policy", "samples/s", "useful", "days", "money", "")
    lines = [header]
    cheapest = min(rows, key=lambda row: row.money_for(samples, price))
    for row in rows:
        layout = row.layout
        notes = ["soonest"] if row is rows[0] else []
        notes += ["cheapest"] if row is cheapest else []
        if row.does_not_fit:
            notes = [f"does not fit: {row.does_not_fit}"]
        lines.append(
            (
                str(layout),
                str(layout.microbatch_size),
                layout.policy,
                str(row.throughput),
                f"{row.useful_fraction:.1%}",
                f"{row.hours_for(samples) / 24:.2f}",
                f"{row.money_for(samples, price):,.0f}",
                ", ".join(notes),
            )
        )
    print_columns(lines)
    best = rows[0]
    gain = more.throughput.mean / best.throughput.mean - 1 if best.throughput.mean else 0.0
    saved = best.money_for(samples, price) - more.money_for(samples, price)
    print(
        f"\none more node ({more.layout}): {gain:+.2%} throughput,"
        f" {best.hours_for(samples) - more.hours_for(samples):+.1f} h sooner,"
        f" {saved:+,.0f} saved on {samples / 1e6:g} million samples"
    )


def print_validation(found: Validation) -> None:
    lines = [("until", "lost", "predicted steps", "measured steps", "")]
    lines += [
        (
            f"{span.until_s:.1f} s",
            str(span.num_lost),
            f"{span.predicted_steps:.1f}",
            f"{span.measured_steps:.0f}",
            "",
        )
        for span in found.spans
    ]
    print_columns(lines)
    verdict = "met" if found.is_within_bar else "MISSED"
    print(
        f"\n{found.num_steps} steps: {found.predicted_s:.2f} s predicted, {found.measured_s:.2f} s"
        f" measured, {found.error_fraction:+.2%} (<= {BAR_FRACTION:.0%}: {verdict})"
    )


def print_grid_head() -> None:
    print(
        f"{'model':12}{'D x P x M':14}{'failures':26}{'/oobleck':>10}{'(fault-free)':>14}"
        f"{'/bamboo':>10}{'(fault-free)':>14}"
    )


def print_cell(cell: Cell) -> None:
    numbers = "".join(
        f"{_ratio(cell.ratio(other)):>10}{_ratio(cell.fault_free_ratio(other)):>14}"
        for other in PUBLISHED
    )
    print(f"{cell.model:12}{cell.shape:14}{cell.failures:26}{numbers}", flush=True)


def _ratio(value: float | None) -> str:
    return "no fit" if value is None else f"{value:.2f}"


def print_spreads(cells: Sequence[Cell]) -> None:
    print()
    for other, published in PUBLISHED.items():
        found = spread([cell.ratio(other) for cell in cells])
        if found is None:
            print(f"everstep / {other}: fits in no cell")
            continue
        is_reached = "reached" if found.best >= published else "NOT reached"
        print(
            f"everstep / {other}: best {found.best:.2f}, median {found.median:.2f},"
            f" worst {found.worst:.2f} over {found.num_cells} cells;"
            f" published maximum {published}: {is_reached}"
        )
