"""A report in one HTML file: the table, and throughput over the trace as curves. No scripts.

The picture is SVG with one line per system; long curves are thinned to what a screen can show, as
means over equal spans, so that short pauses still count.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from everstep.sim.reports import HEADER, duration, recoveries, table
from everstep.sim.results import Outcome
from everstep.sim.setting import Setting
from everstep.sim.trace import Trace

WIDTH, HEIGHT, MARGIN = 960, 360, 48
NUM_SPANS = 480

_COLOURS = (
    *("#0b6e4f", "#5aa469", "#c8553d", "#8d5a97", "#e09f3e"),
    *("#335c67", "#7a8b99", "#9e2a2b", "#222222"),
)


def render(outcomes: Sequence[Outcome], trace: Trace, setting: Setting) -> str:
    job = setting.job
    title = f"{job.name}: {job.replicas} x {job.stages} x {job.microbatches} under {trace.name}"
    ran = [outcome for outcome in outcomes if not outcome.does_not_fit]
    recovered = "".join(
        f"<li><b>{escape(o.system)}</b>: {escape(recoveries(o))}</li>" for o in ran if o.rungs
    )
    facts = (
        f"{setting.nodes} nodes of {setting.workers_per_node} workers, {trace.num_losses} losses in"
        f" {duration(trace.duration_s)}, {duration(trace.mean_outage_s())} each."
        " Throughput in samples per second, means over"
        f" {duration(trace.duration_s / NUM_SPANS)}."
    )
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1><p>{escape(facts)}</p>\n"
        f"{_picture(ran, trace)}\n{_table(outcomes)}\n"
        f"<h2>Recoveries</h2><ul>{recovered}</ul></body></html>\n"
    )


_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.3em .6em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child,td:last-child,th:last-child"
    "{text-align:left}svg{width:100%;height:auto}"
)


def _table(outcomes: Sequence[Outcome]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n"
        for row in table(outcomes)
    )
    return f"<table><tr>{head}</tr>\n{rows}</table>"


def _picture(outcomes: Sequence[Outcome], trace: Trace) -> str:
    top = max((outcome.fault_free_throughput for outcome in outcomes), default=1.0) * 1.05
    lines = []
    for number, outcome in enumerate(outcomes):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{MARGIN + span * (WIDTH - 2 * MARGIN) / NUM_SPANS:.1f},{_y(value, top):.1f}"
            for span, value in enumerate(span_means(outcome, trace.duration_s))
        )
        lines.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        x, y = MARGIN + (number % 5) * 175, HEIGHT + 18 * (1 + number // 5)
        lines.append(
            f'<rect x="{x}" y="{y - 9}" width="12" height="4" fill="{colour}"/>'
            f'<text x="{x + 16}" y="{y}">{escape(outcome.system)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 50}" font-size="12">{_axes(top, trace.duration_s)}'
        f"{''.join(lines)}</svg>"
    )


def _axes(top: float, duration_s: float) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(top * share, top)
        x = MARGIN + share * (WIDTH - 2 * MARGIN)
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
            f'<text x="4" y="{y + 4:.1f}">{top * share:.4g}</text>'
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">'
            f"{duration(duration_s * share)}</text>"
        )
    return "".join(parts)


def _y(value: float, top: float) -> float:
    return HEIGHT - MARGIN - value / top * (HEIGHT - 2 * MARGIN)


def span_means(outcome: Outcome, duration_s: float) -> list[float]:
    """The curve, averaged over equal spans of the trace."""
    span_s = duration_s / NUM_SPANS
    ends = [*outcome.curve_s[1:], duration_s]
    sums = [0.0] * NUM_SPANS
    for start, end, rate in zip(outcome.curve_s, ends, outcome.curve, strict=True):
        first, last = int(start / span_s), min(int(end / span_s), NUM_SPANS - 1)
        for span in range(first, last + 1):
            overlap_s = min(end, (span + 1) * span_s) - max(start, span * span_s)
            sums[span] += rate * max(0.0, overlap_s)
    return [total / span_s for total in sums]
