"""Throughput over the trace as an SVG picture: one strip per system, all to the same scale.

Nine lines in one plot hide each other, so each system has its own strip, with the ideal in grey
behind it. Long curves are thinned to what a screen can show, as means over equal spans, so that
short pauses still count. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everstep.core.svg import svg_text
from everstep.sim.results import Outcome
from everstep.sim.trace import DAY_S, HOUR_S, Trace

WIDTH, LEFT, RIGHT = 980, 190, 80
STRIP, GAP, TOP, BOTTOM = 52, 14, 8, 40
NUM_SPANS = 480

_NODES, _OURS, _THEIRS, _IDEAL = "#7a8b99", "#0b6e4f", "#b5651d", "#999999"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    label: str
    means: list[float]
    top: float
    """The value at its upper edge."""

    colour: str
    note: str
    """At its right end."""

    behind: list[float] | None = None


def picture(outcomes: Sequence[Outcome], trace: Trace) -> str:
    strips = _strips(outcomes, trace)
    height = TOP + len(strips) * (STRIP + GAP) + BOTTOM
    parts = [_strip(strip, TOP + place * (STRIP + GAP)) for place, strip in enumerate(strips)]
    parts.append(_time_axis(trace.duration_s, height - BOTTOM + 4))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _strips(outcomes: Sequence[Outcome], trace: Trace) -> list[Strip]:
    top = _round_up(max((o.fault_free_throughput for o in outcomes), default=1.0))
    ideal = next((o for o in outcomes if o.system == "ideal"), None)
    behind = None if ideal is None else _means(ideal, trace)
    times_s, up = nodes_up(trace)
    mean_up = trace.up_node_seconds() / trace.duration_s
    nodes = Strip(
        label="nodes that are up",
        means=span_means(times_s, up, trace.duration_s),
        top=_round_up(trace.num_nodes),
        colour=_NODES,
        note=f"{mean_up:.4g}",
    )
    return [
        nodes,
        *(
            Strip(
                label=outcome.system,
                means=_means(outcome, trace),
                top=top,
                colour=_colour(outcome),
                note=f"{outcome.throughput:.4g}",
                behind=behind,
            )
            for outcome in outcomes
        ),
    ]


def _colour(outcome: Outcome) -> str:
    return {"everstep": _OURS, "ideal": _IDEAL}.get(outcome.system, _THEIRS)


def _strip(strip: Strip, y: float) -> str:
    base, right = y + STRIP, WIDTH - RIGHT
    points = _points(strip.means, strip.top, y)
    parts = [
        f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>',
        f'<line x1="{LEFT}" x2="{right}" y1="{base:.1f}" y2="{base:.1f}" stroke="#bbb"/>',
        svg_text(LEFT - 6, y + 9, f"{strip.top:g}", anchor="end", size=10, colour="#777"),
        svg_text(LEFT - 6, base, "0", anchor="end", size=10, colour="#777"),
        svg_text(LEFT - 44, y + STRIP / 2 + 4, strip.label, anchor="end"),
        svg_text(right + 8, y + STRIP / 2 + 4, strip.note),
        f'<polygon fill="{strip.colour}" fill-opacity="0.2" points="{LEFT},{base:.1f} {points}'
        f' {right},{base:.1f}"/>',
    ]
    if strip.behind is not None:
        behind = _points(strip.behind, strip.top, y)
        parts.append(f'<polyline fill="none" stroke="{_IDEAL}" points="{behind}"/>')
    parts.append(
        f'<polyline fill="none" stroke="{strip.colour}" stroke-width="1.5" points="{points}"/>'
    )
    return "".join(parts)


def _points(means: Sequence[float], top: float, y: float) -> str:
    width = WIDTH - LEFT - RIGHT
    return " ".join(
        f"{LEFT + place * width / (NUM_SPANS - 1):.1f},{y + STRIP * (1 - value / top):.1f}"
        for place, value in enumerate(means)
    )


def _time_axis(duration_s: float, y: float) -> str:
    """Round numbers, all in the same unit."""
    unit, size = next(
        (found for found in (("days", DAY_S), ("hours", HOUR_S)) if duration_s >= 2 * found[1]),
        ("minutes", 60.0),
    )
    step = _round_up(duration_s / size / 8, multiples=(1, 2, 5))
    parts = [svg_text(WIDTH - RIGHT + 8, y + 8, unit, colour="#777")]
    for number in range(int(duration_s / size / step) + 1):
        x = LEFT + number * step * size / duration_s * (WIDTH - LEFT - RIGHT)
        parts.append(svg_text(x, y + 8, f"{number * step:g}", anchor="middle", colour="#777"))
    return "".join(parts)


def _round_up(value: float, *, multiples: Sequence[float] = (1, 2, 2.5, 3, 4, 5, 6, 8)) -> float:
    """To the next such multiple of a power of ten."""
    scale = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(scale * m for m in (*multiples, 10) if scale * m >= value * (1 - 1e-9))


def nodes_up(trace: Trace) -> tuple[list[float], list[float]]:
    """Times, and how many are up from each on."""
    sign = np.where(trace.is_loss, -1.0, 1.0)
    at_start = float((~trace.starts_down).sum())
    return [0.0, *trace.time_s.tolist()], [at_start, *(at_start + np.cumsum(sign)).tolist()]


def _means(outcome: Outcome, trace: Trace) -> list[float]:
    return span_means(outcome.curve_s, outcome.curve, trace.duration_s)


def span_means(times_s: Sequence[float], values: Sequence[float], duration_s: float) -> list[float]:
    """A curve of steps, averaged over equal spans of the trace."""
    edges = np.linspace(0.0, duration_s, NUM_SPANS + 1)
    starts = np.asarray(times_s)
    areas = np.diff(starts, append=duration_s) * np.asarray(values)
    sums = np.concatenate(([0.0], np.cumsum(areas)))
    area_until = np.interp(edges, np.append(starts, duration_s), sums)
    return [float(mean) for mean in np.diff(area_until) / np.diff(edges)]
