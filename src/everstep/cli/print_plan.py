"""Plans on a terminal: a coloured grid and a summary underneath."""

from __future__ import annotations

import json
import sys
from enum import StrEnum

from everstep.schedule.actions import Kind
from everstep.schedule.documents import plan_to_json
from everstep.schedule.grid import LOST, Cell, lay_out_grid, render_grid, ruler
from everstep.schedule.plan import Plan
from everstep.schedule.svg import render_svg

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white", "bright_black")
_EMPHASIS = {Kind.FORWARD: "", Kind.INPUT_GRADIENT: "bold", Kind.WEIGHT_GRADIENT: "dim"}


class Format(StrEnum):
    GRID = "grid"
    JSON = "json"
    SVG = "svg"


def plan_text(plan: Plan, output_format: Format) -> str:
    match output_format:
        case Format.GRID:
            return f"{render_grid(plan)}\n\n{summary(plan)}"
        case Format.JSON:
            return json.dumps(plan_to_json(plan))
        case Format.SVG:
            return render_svg(plan).rstrip("\n")


def print_grid(plan: Plan) -> None:
    """Colour is the origin replica; B is bold and W dim. Without a terminal, plain text."""
    if not sys.stdout.isatty():
        print(plan_text(plan, Format.GRID))
        return
    # Imported here, because it takes a good part of the command's start.
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    grid = lay_out_grid(plan)
    margin = 2 + max(len(str(row.worker)) for row in grid.rows)
    console.print(Text(" " * margin + ruler(grid, len(grid.rows[0].cells)), "dim"), soft_wrap=True)
    for row in grid.rows:
        if row.worker.replica == 0 and row.worker.stage:
            console.print()
        line = Text(str(row.worker).ljust(margin))
        if row.is_lost:
            line.append(LOST, "red reverse")
        else:
            for cell in row.cells:
                line.append(cell.text.ljust(grid.width), _style(cell))
        console.print(line, soft_wrap=True)
    console.print(f"\n{summary(plan)}", soft_wrap=True)


def _style(cell: Cell) -> str:
    if cell.replica is None or cell.kind is None:
        return "dim"
    return f"{_EMPHASIS[cell.kind]} {_COLOURS[cell.replica % len(_COLOURS)]}".strip()


def summary(plan: Plan) -> str:
    problem, base = plan.problem, plan.baselines
    lost = ", ".join(map(str, sorted(problem.lost))) or "nobody"
    if plan.is_proved_optimal:
        quality = "optimal: it equals the lower bound"
    else:
        quality = f"{plan.gap_fraction:.1%} above the lower bound {plan.lower_bound:g}"
    peaks = " ".join(map(str, plan.peak_in_flight))
    lines = [
        f"{problem.replicas} replicas x {problem.stages} stages x {problem.microbatches}"
        f" micro-batches, {problem.variant}, lost: {lost}",
        f"  period          {plan.period:<10g}{quality}",
        f"  makespan        {plan.makespan:<10g}one step from its first F to its last update",
        f"  in flight       {peaks:<9} peak per stage",
        f"  1F1B            {base.one_f_one_b:<10g}without losses"
        f"; this plan takes {plan.period / base.one_f_one_b:.2f} of it",
        f"  decoupled       {base.decoupled:<10g}without losses, same limits",
        f"  fault-scaled    {base.fault_scaled:<10.4g}decoupled x all / live workers",
    ]
    return "\n".join(lines)
