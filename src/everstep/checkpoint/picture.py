"""A picture of where checkpoints go: the loss curve, and under it a row of marks for each policy.

An SVG to scale, without any library; fonts and colours are safe for print.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from everstep.checkpoint.curve_fit import Floats
from everstep.checkpoint.rehearsal import settled
from everstep.core.svg import round_ticks, svg_text

# Okabe and Ito's palette: told apart by the colour-blind, too.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7F7F7F")
_WIDTH, _LEFT, _RIGHT = 1100, 190, 70
_TOP, _PLOT, _GAP, _ROW, _BOTTOM = 66, 250, 16, 26, 44
_MOST_POINTS = 1500
"""Of a line: more than one per pixel only makes the file larger."""


def render_svg(
    losses: Floats, marks: Mapping[str, Sequence[int]], *, title: str, notes: str
) -> str:
    """`marks` are the steps, counted from 1, after which each policy saves."""
    rows_top = _TOP + _PLOT + _GAP
    height = rows_top + _ROW * len(marks) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        svg_text(14, 26, title, size=16, weight="bold"),
        svg_text(14, 47, notes, size=12, colour="#444"),
        *_curve(losses),
        svg_text(_WIDTH - _RIGHT + 8, rows_top - 2, "saves", colour="#666"),
    ]
    for number, (name, steps) in enumerate(marks.items()):
        colour = _HUES[number % len(_HUES)]
        parts += _row(name, steps, rows_top + _ROW * number, colour, num_steps=len(losses))
    parts += _step_axis(len(losses), height - _BOTTOM + 8)
    return "\n".join([*parts, "</svg>", ""])


def _x(step: float, num_steps: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / num_steps


def _curve(losses: Floats) -> Iterator[str]:
    best = settled(losses)
    low, high = float(best.min()), float(best.max())
    # A run that diverges would press everything else flat: what is above is cut off.
    room = 0.08 * (high - low) or 1.0
    low, high = low - room, high + room

    def y(loss: Floats) -> Floats:
        return _TOP + _PLOT * (high - np.clip(loss, low, high)) / (high - low)

    yield (
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_PLOT}"'
        ' fill="#fafafa" stroke="#ccc"/>'
    )
    for tick in round_ticks(low, high, at_most=6):
        at = float(y(np.array(tick)))
        yield _rule(at, "#eee")
        yield svg_text(_LEFT - 8, at + 4, f"{tick:g}", anchor="end", colour="#666")
    yield svg_text(14, _TOP + 14, "loss of each step,", colour="#666")
    yield svg_text(14, _TOP + 30, "and the best so far", colour="#666")
    yield _line(y(losses), len(losses), first_step=1, colour="#bbb", width=0.8)
    yield _line(y(best), len(losses), first_step=0, colour="#111", width=1.8)


def _line(heights: Floats, num_steps: int, *, first_step: int, colour: str, width: float) -> str:
    chosen = np.unique(np.linspace(0, len(heights) - 1, _MOST_POINTS).astype(np.int64))
    points = " ".join(f"{_x(i + first_step, num_steps):.1f},{heights[i]:.1f}" for i in chosen)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _row(
    name: str, steps: Sequence[int], top: float, colour: str, *, num_steps: int
) -> Iterator[str]:
    middle, right = top + _ROW / 2, _WIDTH - _RIGHT
    yield svg_text(14, middle + 4, name)
    yield _rule(middle, "#ddd")
    marks = "".join(f"M{_x(step, num_steps):.1f} {top + 5:.1f}v{_ROW - 10}" for step in steps)
    if marks:
        yield f'<path d="{marks}" stroke="{colour}" stroke-width="1.3" fill="none"/>'
    yield svg_text(right + 8, middle + 4, str(len(steps)), colour="#444")


def _step_axis(num_steps: int, top: float) -> Iterator[str]:
    for tick in round_ticks(0, num_steps, at_most=10):
        at = _x(tick, num_steps)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 6}" y2="{top}" stroke="#888"/>'
        yield svg_text(at, top + 14, f"{tick:g}", anchor="middle", colour="#666")
    yield svg_text(14, top + 14, "step", colour="#666")


def _rule(y: float, colour: str) -> str:
    right = _WIDTH - _RIGHT
    return f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>'
