"""Sweeps, validations and the evaluation grid on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.cli.print_simulation import print_columns
from everstep.sim.evaluation import Cell, spread
from everstep.sim.reports import duration
from everstep.sim.sweep import Row
from everstep.sim.trace import HOUR_S
from everstep.sim.validate import BAR_FRACTION, Validation

PUBLISHED = {"oobleck": 1.46, "bamboo": 1.64}
"""The most that ReCycle reports (arXiv 2405.14009)."""


def print_sweep(
    rows: Sequence[Row], more: Row, *, num_nodes: int, samples: float, price: float
) -> None:
    best, cheapest = rows[0], min(rows, key=lambda row: row.money_for(samples, price))
    print(
        f"{num_nodes} nodes; time and money for {samples / 1e6:g} million samples at {price:g} a"
        " device hour\n"
    )
    lines = [_SWEEP_HEADER]
    for row in rows:
        notes = ["soonest"] if row is best else []
        notes += ["cheapest"] if row is cheapest else []
        lines.append(_sweep_line(row, ", ".join(notes), samples=samples, price=price))
    print_columns(lines)
    print(f"\n{_one_more(best, more, num_nodes=num_nodes, samples=samples, price=price)}")


_SWEEP_HEADER: tuple[str, ...] = (
    *("replicas x stages x micro-batches", "samples each", "checkpoints", "samples/s"),
    *("useful", "time", "money", ""),
)


def _sweep_line(row: Row, notes: str, *, samples: float, price: float) -> tuple[str, ...]:
    layout = row.layout
    begin = (str(layout), str(layout.microbatch_size), layout.policy)
    if row.does_not_fit:
        return (*begin, "-", "-", "-", "-", f"does not fit: {row.does_not_fit}")
    return (
        *begin,
        str(row.throughput),
        f"{row.useful_fraction:.1%}",
        duration(row.hours_for(samples) * HOUR_S),
        f"{row.money_for(samples, price):,.0f}",
        notes,
    )


def _one_more(best: Row, more: Row, *, num_nodes: int, samples: float, price: float) -> str:
    """Against the best layout of each."""
    if not best.throughput.mean:
        return "no layout gets anywhere, so there is nothing to compare one more node with"
    gain = more.throughput.mean / best.throughput.mean - 1
    sooner_s = (best.hours_for(samples) - more.hours_for(samples)) * HOUR_S
    saved = best.money_for(samples, price) - more.money_for(samples, price)
    when = f"{duration(abs(sooner_s))} {'sooner' if sooner_s >= 0 else 'later'}"
    cost = f"{abs(saved):,.2f} {'cheaper' if saved >= 0 else 'dearer'}"
    return (
        f"one more node ({num_nodes + 1}, best as {more.layout} with {more.layout.microbatch_size}"
        f" samples each): {gain:+.2%} throughput, so {when} and {cost}"
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
    print()
    _print_parts(found)
    verdict = "met" if found.is_within_bar else "MISSED"
    print(
        f"\n{found.num_steps} steps: {found.predicted_s:.2f} s predicted, {found.measured_s:.2f} s"
        f" measured, {found.error_fraction:+.2%} (<= {BAR_FRACTION:.0%}: {verdict})"
    )


def _print_parts(found: Validation) -> None:
    lines = [("spent on", "number", "predicted", "measured", "difference", "")]
    lines += [
        (
            part.kind,
            str(part.number),
            f"{part.predicted_s:.2f} s",
            f"{part.measured_s:.2f} s",
            f"{part.difference_s:+.2f} s",
            "",
        )
        for part in found.parts
    ]
    print_columns(lines)
    print(
        "Recoveries and joins last from the step finished before to the first one after: what is"
        " thrown away of\na step, the pause, and that first step."
        f" F, B and W took {found.slowdown:.3f} times as long from the first\nloss on as before;"
        " 1 is predicted."
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
