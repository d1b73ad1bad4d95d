"""Outcomes as a JSON document (docs/simulator.md has the contract) and as lines of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from everstep.sim.results import Outcome
from everstep.sim.setting import Setting
from everstep.sim.trace import HOUR_S, Trace

FORMAT = 1
"""Raised when a field changes its meaning; new fields do not raise it."""

Json = dict[str, Any]


def to_json(outcomes: Sequence[Outcome], trace: Trace, setting: Setting) -> Json:
    job = setting.job
    return {
        "format": FORMAT,
        "job": {
            "name": job.name,
            "replicas": job.replicas,
            "stages": job.stages,
            "microbatches": job.microbatches,
            "samples_per_step": job.samples_per_step,
            "devices_per_worker": job.devices_per_worker,
            "state_bytes": job.state_bytes,
            "in_flight": list(job.in_flight() or ()),
        },
        "cluster": {"nodes": setting.nodes, "workers_per_node": setting.workers_per_node},
        "log_groups": setting.log_groups,
        "trace": {
            "name": trace.name,
            "nodes": trace.num_nodes,
            "hours": trace.duration_s / HOUR_S,
            "losses": trace.num_losses,
            "mean_outage_hours": trace.mean_outage_s() / HOUR_S,
        },
        "constants": asdict(setting.constants),
        "systems": [_system(outcome) for outcome in outcomes],
    }


def _system(outcome: Outcome) -> Json:
    document = asdict(outcome)
    document["curve"] = [list(point) for point in zip(outcome.curve_s, outcome.curve, strict=True)]
    del document["curve_s"]
    return document


def table(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The header and a row per system. Throughputs in samples per second."""
    ideal = next((o.throughput for o in outcomes if o.system == "ideal"), 0.0)
    is_priced = any(outcome.money is not None for outcome in outcomes)
    header = ["system", "fault-free", "average", "of ideal", "useful", "steps lost"]
    header += ["per million"] if is_priced else []
    rows = [_row(outcome, ideal, is_priced=is_priced) for outcome in outcomes]
    return [(*header, "down", "why"), *rows]


def _row(outcome: Outcome, ideal: float, *, is_priced: bool) -> tuple[str, ...]:
    if outcome.does_not_fit:
        why = f"does not fit: {outcome.does_not_fit}"
        return (outcome.system, *["-"] * (7 if is_priced else 6), why)
    price = outcome.money_per_million_samples
    return (
        outcome.system,
        f"{outcome.fault_free_throughput:.2f}",
        f"{outcome.throughput:.2f}",
        f"{outcome.throughput / ideal:.1%}" if ideal else "-",
        f"{outcome.useful_fraction:.1%}",
        f"{outcome.steps_lost:.0f}",
        *(["-" if price is None else f"{price:,.2f}"] if is_priced else []),
        duration(sum(outcome.down_s.values())),
        main_causes(outcome),
    )


LEGEND = (
    "average: samples per second that were kept; useful: share of the time spent on them;"
    " down: time spent otherwise, and what for"
)


def main_causes(outcome: Outcome, *, most: int = 3) -> str:
    causes = sorted(outcome.down_s.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in causes if seconds >= 0.5)


def duration(seconds: float) -> str:
    """In the largest unit that leaves a number above 1."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def recoveries(outcome: Outcome) -> str:
    return ", ".join(f"{number} {rung}" for rung, number in outcome.rungs.items()) or "none"
