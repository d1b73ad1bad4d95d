"""A picture of what a byte of log buys: expected recovery against bytes, and the groups beneath.

An SVG to scale, without any library; fonts and colours are safe for print.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everstep.core.sizes import render_bytes
from everstep.core.svg import round_ticks, svg_text
from everstep.recovery.grouping import Grouping

# Two of Okabe and Ito's colours: told apart by the colour-blind, too.
_CURVE, _CHOSEN = "#0072B2", "#D55E00"
_WIDTH, _LEFT, _RIGHT = 1100, 190, 40
_TOP, _PLOT, _GAP, _ROW = 66, 260, 84, 24
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_MOST_ROWS = 16


def render_svg(
    curve: Sequence[Grouping], chosen: Grouping, *, budget_bytes: int | None, title: str, notes: str
) -> str:
    """`curve` as of `grouping.tradeoff`; without a budget everything may be logged."""
    shown = thin(curve, chosen, at_most=_MOST_ROWS)
    height = _TOP + _PLOT + _GAP + _ROW * len(shown) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        svg_text(14, 26, title, size=16, weight="bold"),
        svg_text(14, 47, notes, size=12, colour="#444"),
        *_Plot(curve).draw(chosen, budget_bytes),
        *_rows(shown, chosen, _TOP + _PLOT + _GAP),
    ]
    return "\n".join([*parts, "</svg>", ""])


def thin(curve: Sequence[Grouping], chosen: Grouping, *, at_most: int) -> list[Grouping]:
    """The curve, or when it is long both its ends, what was chosen, and some evenly between."""
    if len(curve) <= at_most:
        return list(curve)
    last, spread = len(curve) - 1, at_most - 1
    numbers = {round(last * i / (spread - 1)) for i in range(spread)} | {curve.index(chosen)}
    return [curve[number] for number in sorted(numbers)]


class _Plot:
    """The curve and its axes. Seconds begin at 0, so that heights may be compared."""

    def __init__(self, curve: Sequence[Grouping]) -> None:
        self._curve = curve
        self._most_bytes = 1.04 * (curve[-1].bytes or 1)
        self._most_s = 1.12 * (curve[0].expected_s or 1.0)

    def draw(self, chosen: Grouping, budget_bytes: int | None) -> Iterator[str]:
        yield (
            f'<rect x="{_LEFT}" y="{_TOP}" width="{_PLOT_WIDTH}" height="{_PLOT}"'
            ' fill="#fafafa" stroke="#ccc"/>'
        )
        yield from self._axes()
        if budget_bytes is not None:
            yield from self._budget(budget_bytes)
        yield self._stairs()
        for point in self._curve:
            yield self._dot(point, 3.0, _CURVE)
        yield self._dot(chosen, 6.5, _CHOSEN)

    def _x(self, num_bytes: float) -> float:
        return _LEFT + _PLOT_WIDTH * num_bytes / self._most_bytes

    def _y(self, seconds: float) -> float:
        return _TOP + _PLOT * (1 - seconds / self._most_s)

    def _axes(self) -> Iterator[str]:
        for tick in round_ticks(0, self._most_s, at_most=6):
            y = self._y(tick)
            yield _line((_LEFT, y), (_WIDTH - _RIGHT, y), "#eee")
            yield svg_text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end", colour="#666")
        bottom = _TOP + _PLOT
        for tick in round_ticks(0, self._most_bytes, at_most=10):
            x = self._x(tick)
            yield _line((x, bottom), (x, bottom + 4), "#888")
            label = render_bytes(tick)
            yield svg_text(x, bottom + 17, label, anchor="middle", colour="#666")
        yield svg_text(14, _TOP + 14, "expected seconds", colour="#666")
        yield svg_text(14, _TOP + 30, "of a recovery", colour="#666")
        middle = _LEFT + _PLOT_WIDTH / 2
        label = "bytes of log, all workers together"
        yield svg_text(middle, bottom + 35, label, anchor="middle", colour="#666")

    def _budget(self, budget_bytes: int) -> Iterator[str]:
        label = f"budget {render_bytes(budget_bytes)}"
        if budget_bytes > self._most_bytes:
            text = f"{label}: more than all"
            yield svg_text(_WIDTH - _RIGHT - 8, _TOP + 16, text, anchor="end", colour=_CHOSEN)
            return
        x = self._x(budget_bytes)
        yield _line((x, _TOP), (x, _TOP + _PLOT), _CHOSEN, dashes="5 4")
        side, anchor = (-6, "end") if x > _WIDTH / 2 else (6, "start")
        yield svg_text(x + side, _TOP + 16, label, anchor=anchor, colour=_CHOSEN)

    def _stairs(self) -> str:
        """What a budget buys does not change until the next grouping fits into it."""
        corners = [f"M{self._x(0):.1f} {self._y(self._curve[0].expected_s):.1f}"]
        corners += [f"H{self._x(p.bytes):.1f}V{self._y(p.expected_s):.1f}" for p in self._curve]
        path = "".join([*corners, f"H{_WIDTH - _RIGHT}"])
        return f'<path d="{path}" fill="none" stroke="{_CURVE}" stroke-width="1.8"/>'

    def _dot(self, point: Grouping, radius: float, colour: str) -> str:
        at = f'cx="{self._x(point.bytes):.1f}" cy="{self._y(point.expected_s):.1f}"'
        return f'<circle {at} r="{radius}" fill="{colour}"/>'


def _rows(shown: Sequence[Grouping], chosen: Grouping, top: float) -> Iterator[str]:
    yield svg_text(70, top - 10, "log", anchor="end", colour="#666")
    yield svg_text(_LEFT - 60, top - 10, "recovery", anchor="end", colour="#666")
    label = "stages; between boxes the log is kept, a box is replayed as a whole"
    yield svg_text(_LEFT, top - 10, label, colour="#666")
    for number, grouping in enumerate(shown):
        yield from _row(grouping, top + _ROW * number, is_chosen=grouping == chosen)


def _row(grouping: Grouping, top: float, *, is_chosen: bool) -> Iterator[str]:
    colour, weight = (_CHOSEN, "bold") if is_chosen else ("#111", "normal")
    baseline = top + _ROW / 2 + 4
    size, seconds = render_bytes(grouping.bytes), f"{grouping.expected_s:.4g} s"
    yield svg_text(70, baseline, size, anchor="end", colour=colour, weight=weight)
    yield svg_text(_LEFT - 60, baseline, seconds, anchor="end", colour=colour, weight=weight)
    if is_chosen:
        yield svg_text(_LEFT - 8, baseline, "chosen", anchor="end", colour=colour)
    width = _PLOT_WIDTH / grouping.groups[-1].stop
    for group in grouping.groups:
        yield (
            f'<rect x="{_LEFT + width * group.start + 1.5:.1f}" y="{top + 3}"'
            f' width="{width * len(group) - 3:.1f}" height="{_ROW - 6}" rx="3"'
            f' fill="{_CHOSEN if is_chosen else _CURVE}" fill-opacity="0.3"/>'
        )
        if width >= 14:
            for stage in group:
                middle = _LEFT + width * (stage + 0.5)
                yield svg_text(middle, baseline, str(stage), anchor="middle", size=10)


def _line(
    start: tuple[float, float], end: tuple[float, float], colour: str, *, dashes: str = "none"
) -> str:
    (x1, y1), (x2, y2) = start, end
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-dasharray="{dashes}"/>'
    )
