"""A plan as a picture: the same grid as an SVG, to scale, for papers and pages.

Colour is the origin replica, shade the kind; lost workers are hatched, adopted micro-batches have
a heavy frame and their replica's number. Fonts and colours are safe for print.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.core.ids import WorkerId
from everstep.core.svg import svg_text
from everstep.schedule.actions import Action, Kind
from everstep.schedule.grid import label
from everstep.schedule.plan import Plan

# Okabe and Ito's palette: told apart by the colour-blind, too.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7F7F7F")
_OPACITY = {Kind.FORWARD: 0.38, Kind.INPUT_GRADIENT: 0.85, Kind.WEIGHT_GRADIENT: 0.6}
_NAMES = {
    Kind.FORWARD: "F forward",
    Kind.INPUT_GRADIENT: "B gradient of the input",
    Kind.WEIGHT_GRADIENT: "W gradient of the weights",
}

_ROW, _GAP, _STAGE_GAP = 22, 3, 12
_LEFT, _TOP, _BOTTOM = 104, 62, 66
_WIDTH = 1100
_MOST_LABELS = 60
"""Above so many slots a row the boxes are too narrow for text."""


def render_svg(plan: Plan) -> str:
    problem = plan.problem
    span = max((action.end for row in plan.actions.values() for action in row), default=1.0)
    scale = (_WIDTH - _LEFT - 20) / span
    rows = list(_rows(plan))
    height = rows[-1][1] + _ROW + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        "<defs><pattern id='lost' width='7' height='7' patternTransform='rotate(45)'"
        " patternUnits='userSpaceOnUse'><rect width='7' height='7' fill='#f4f4f4'/>"
        "<line x1='0' y1='0' x2='0' y2='7' stroke='#b5b5b5' stroke-width='2'/></pattern></defs>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        svg_text(14, 24, _title(plan), size=16, weight="bold"),
        svg_text(14, 44, _subtitle(plan), size=12, colour="#444"),
    ]
    for worker, top in rows:
        if worker.replica == 0:
            parts.append(svg_text(14, top + 15, f"stage {worker.stage}", size=11, colour="#666"))
        parts.append(svg_text(_LEFT - 10, top + 15, str(worker), size=11, anchor="end"))
        if worker in problem.lost:
            parts.append(_box(_LEFT, top, span * scale, "url(#lost)", 1.0, stroke="#b5b5b5"))
            parts.append(svg_text(_LEFT + span * scale / 2, top + 15, "lost", anchor="middle"))
        has_labels = span / _shortest(plan) <= _MOST_LABELS
        for action in plan.actions.get(worker, ()):
            parts += _action(action, _LEFT + action.start * scale, top, scale, has_labels)
    parts += _axis(span, scale, height - _BOTTOM + 12)
    parts += _legend(plan, height - 14)
    return "\n".join([*parts, "</svg>", ""])


def _rows(plan: Plan) -> Iterator[tuple[WorkerId, int]]:
    top = _TOP
    for stage in range(plan.problem.stages):
        for replica in range(plan.problem.replicas):
            yield WorkerId(replica, stage), top
            top += _ROW + _GAP
        top += _STAGE_GAP


def _shortest(plan: Plan) -> float:
    lengths = (a.end - a.start for row in plan.actions.values() for a in row if a.end > a.start)
    return min(lengths, default=1.0)


def _title(plan: Plan) -> str:
    problem = plan.problem
    lost = ", ".join(map(str, sorted(problem.lost))) or "nobody"
    return (
        f"{problem.replicas} replicas × {problem.stages} stages × {problem.microbatches}"
        f" micro-batches, lost: {lost}"
    )


def _subtitle(plan: Plan) -> str:
    proved = "optimal" if plan.is_proved_optimal else f"bound {plan.lower_bound:g}"
    base = plan.baselines
    return (
        f"{plan.problem.variant}: period {plan.period:g} ({proved}), makespan {plan.makespan:g}"
        f"   |   without losses: 1F1B {base.one_f_one_b:g}, decoupled {base.decoupled:g};"
        f" fault-scaled {base.fault_scaled:.4g}"
    )


def _action(action: Action, left: float, top: int, scale: float, has_label: bool) -> Iterator[str]:
    width = (action.end - action.start) * scale
    if width <= 0:
        return
    hue = _HUES[action.replica % len(_HUES)]
    stroke, stroke_width = ("#111", 1.8) if action.is_adopted else ("white", 1.0)
    yield _box(left, top, width, hue, _OPACITY[action.kind], stroke=stroke, line=stroke_width)
    if has_label:
        colour = "white" if action.kind is Kind.INPUT_GRADIENT else "#111"
        yield svg_text(
            left + width / 2, top + 15, label(action), size=10, anchor="middle", colour=colour
        )


def _axis(span: float, scale: float, top: int) -> Iterator[str]:
    step = next(s for s in _round_numbers() if span / s <= 20)
    right = _LEFT + span * scale
    yield f'<line x1="{_LEFT}" y1="{top}" x2="{right:.1f}" y2="{top}" stroke="#888"/>'
    tick = 0
    while tick * step <= span:
        at = _LEFT + tick * step * scale
        yield f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{top + 4}" stroke="#888"/>'
        yield svg_text(at, top + 16, f"{tick * step:g}", size=10, anchor="middle", colour="#666")
        tick += 1


def _round_numbers() -> Iterator[float]:
    for exponent in range(-9, 10):
        for digit in (1, 2, 5):
            yield digit * 10.0**exponent


def _legend(plan: Plan, baseline: int) -> Iterator[str]:
    left = float(_LEFT)
    for replica in range(min(plan.problem.replicas, len(_HUES))):
        yield _box(left, baseline - 11, 12, _HUES[replica], 0.7, height=12)
        yield svg_text(left + 17, baseline, f"replica {replica}", size=11)
        left += 82
    for kind, name in _NAMES.items():
        yield _box(left, baseline - 11, 12, "#333", _OPACITY[kind], height=12)
        yield svg_text(left + 17, baseline, name, size=11)
        left += 50 + 6.2 * len(name)
    if plan.problem.lost:
        yield _box(left, baseline - 11, 12, "#ddd", 1.0, stroke="#111", line=1.8, height=12)
        yield svg_text(left + 17, baseline, "adopted", size=11)


def _box(
    left: float,
    top: float,
    width: float,
    fill: str,
    opacity: float,
    *,
    stroke: str = "none",
    line: float = 1.0,
    height: int = _ROW,
) -> str:
    # The frame is drawn inside the box, so that neighbours do not cover it.
    inset = line / 2
    return (
        f'<rect x="{left + inset:.2f}" y="{top + inset:.2f}"'
        f' width="{max(width - line, 0.4):.2f}" height="{height - line:.2f}" rx="2" fill="{fill}"'
        f' fill-opacity="{opacity}" stroke="{stroke}" stroke-width="{line}"/>'
    )
