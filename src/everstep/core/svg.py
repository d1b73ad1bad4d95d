"""Text and ticks of SVG pictures, in the one style of all our pictures."""

from __future__ import annotations

import math
from html import escape


def svg_text(
    left: float,
    baseline: float,
    text: str,
    *,
    size: int = 11,
    anchor: str = "start",
    colour: str = "#111",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{left:.1f}" y="{baseline:.1f}" font-size="{size}" text-anchor="{anchor}"'
        f' fill="{colour}" font-weight="{weight}">{escape(text)}</text>'
    )


def round_ticks(low: float, high: float, *, at_most: int) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / unit), math.floor(high / unit)
    return [number * unit for number in range(first, last + 1)]
