"""A plan as a grid of text: one row per worker, one column per slot.

0:0  F0 F1 F2 ·  B0 F3 ...      own micro-batches
1:0  F0 F1 F4² ...              F4² is micro-batch 4 of replica 2, adopted
2:0  lost
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind
from everstep.schedule.plan import Plan

_SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

IDLE, GOES_ON, LOST = "·", "─", "lost"

_MOST_COLUMNS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    text: str
    kind: Kind | None = None
    replica: int | None = None
    """The origin replica of the micro-batch; none for an idle slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    worker: WorkerId
    is_lost: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    slot: float
    """The time one column stands for."""

    width: int
    """Of a cell, in characters, the space between cells included."""

    rows: tuple[GridRow, ...]


def label(action: Action) -> str:
    origin = str(action.replica).translate(_SUPERSCRIPT) if action.is_adopted else ""
    return f"{action.kind}{action.microbatch}{origin}"


def lay_out_grid(plan: Plan) -> Grid:
    slot = _slot(plan)
    num_columns = max(1, round((plan.makespan - plan.problem.durations.synchronization) / slot))
    rows = []
    for stage in range(plan.problem.stages):
        for replica in range(plan.problem.replicas):
            worker = WorkerId(replica, stage)
            actions = plan.actions.get(worker, ())
            cells = tuple(_cells(actions, slot, num_columns))
            rows.append(GridRow(worker=worker, is_lost=worker in plan.problem.lost, cells=cells))
    longest = max(len(cell.text) for row in rows for cell in row.cells)
    return Grid(slot=slot, width=longest + 1, rows=tuple(rows))


def _slot(plan: Plan) -> float:
    """The shortest action that takes time, or more when the grid would grow too wide."""
    shortest = min(
        action.end - action.start
        for row in plan.actions.values()
        for action in row
        if action.end > action.start
    )
    return max(shortest, plan.makespan / _MOST_COLUMNS)


def _cells(actions: tuple[Action, ...], slot: float, num_columns: int) -> Iterator[Cell]:
    cells = [Cell(text=IDLE)] * num_columns
    for action in actions:
        first, last = round(action.start / slot), round(action.end / slot)
        for column in range(first, min(last, num_columns)):
            text = label(action) if column == first else GOES_ON
            cells[column] = Cell(text=text, kind=action.kind, replica=action.replica)
    yield from cells


def ruler(grid: Grid, num_columns: int) -> str:
    """Every fifth slot's number, over its column."""
    return "".join(
        (str(column) if column % 5 == 0 else "").ljust(grid.width) for column in range(num_columns)
    ).rstrip()


def render_grid(plan: Plan) -> str:
    """Without colour; stages are set apart by a blank line."""
    grid = lay_out_grid(plan)
    margin = 2 + max(len(str(row.worker)) for row in grid.rows)
    lines = [" " * margin + ruler(grid, len(grid.rows[0].cells))]
    for row in grid.rows:
        if row.worker.replica == 0 and row.worker.stage:
            lines.append("")
        cells = "".join(cell.text.ljust(grid.width) for cell in row.cells)
        shown = LOST if row.is_lost else cells.rstrip()
        lines.append(str(row.worker).ljust(margin) + shown)
    return "\n".join(lines)
