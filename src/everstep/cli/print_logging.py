"""What a byte of log buys, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.cli.print_plan import Format
from everstep.core.sizes import render_bytes
from everstep.recovery.grouping import Costs, Grouping, recovery_s
from everstep.recovery.grouping_picture import render_svg, thin

_MOST_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """What is shown: the whole curve, and the point on it that the budget chooses."""

    costs: Costs
    budget_bytes: int | None
    curve: tuple[Grouping, ...]
    chosen: Grouping


def tradeoff_text(found: Tradeoff, output_format: Format) -> str:
    match output_format:
        case Format.GRID:
            return _table(found)
        case Format.JSON:
            return json.dumps(_document(found))
        case Format.SVG:
            return _picture(found)


def _facts(found: Tradeoff) -> str:
    costs = found.costs
    budget = "no limit" if found.budget_bytes is None else render_bytes(found.budget_bytes)
    return (
        f"{len(costs.stages)} stages x {costs.microbatches} micro-batches, logs of"
        f" {costs.interval_steps} steps, {costs.replayed_steps:g} replayed on average,"
        f" budget {budget}"
    )


def _table(found: Tradeoff) -> str:
    shown = thin(found.curve, found.chosen, at_most=_MOST_ROWS)
    lines = [
        _facts(found),
        "",
        f"{'':8}{'':10}{'recovery':>20}",
        f"{'log':>8}{'of all':>10}{'expected':>11}{'worst':>9}   stages replayed together",
    ]
    for grouping in shown:
        mark = "   <- chosen" if grouping == found.chosen else ""
        lines.append(
            f"{render_bytes(grouping.bytes):>8}{_fraction(grouping, found):>10.1%}"
            f"{grouping.expected_s:>9.4g} s{_worst_s(grouping, found):>7.4g} s"
            f"   {_names(grouping.groups)}{mark}"
        )
    if len(shown) < len(found.curve):
        lines.append(f"({len(shown)} of {len(found.curve)} points; --format json has all)")
    return "\n".join(lines)


def _names(groups: Sequence[range]) -> str:
    return " ".join(
        str(group.start) if len(group) == 1 else f"{group.start}-{group[-1]}" for group in groups
    )


def _fraction(grouping: Grouping, found: Tradeoff) -> float:
    """Of the log of every boundary."""
    num_boundaries = len(found.costs.boundaries)
    whole = sum(found.costs.kept_bytes(boundary) for boundary in range(num_boundaries))
    return grouping.bytes / whole if whole else 0.0


def _worst_s(grouping: Grouping, found: Tradeoff) -> float:
    return max(_recoveries(grouping, found))


def _recoveries(grouping: Grouping, found: Tradeoff) -> list[float]:
    return [recovery_s(found.costs, group) for group in grouping.groups]


def _document(found: Tradeoff) -> dict[str, object]:
    costs = found.costs
    return {
        "format": 1,
        "stages": len(costs.stages),
        "microbatches": costs.microbatches,
        "interval_steps": costs.interval_steps,
        "replayed_steps": costs.replayed_steps,
        "budget_bytes": found.budget_bytes,
        "chosen": found.curve.index(found.chosen),
        "curve": [
            {
                "bytes": grouping.bytes,
                "bytes_fraction": _fraction(grouping, found),
                "expected_seconds": grouping.expected_s,
                "groups": [list(group) for group in grouping.groups],
                "recovery_seconds": _recoveries(grouping, found),
                "logged": sorted(grouping.logged),
            }
            for grouping in found.curve
        ],
    }


def _picture(found: Tradeoff) -> str:
    return render_svg(
        found.curve,
        found.chosen,
        budget_bytes=found.budget_bytes,
        title="What a byte of log buys",
        notes=_facts(found),
    ).rstrip("\n")
