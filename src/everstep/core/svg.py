"""Text in an SVG picture, in the one style of all our pictures."""

from __future__ import annotations

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
