"""Synthetic traces, each from a seed. The same seed gives the same trace.

exponential   nodes fail independently at a constant rate
weibull       shape below 1: the younger a node since its repair, the likelier it fails
racks         a share of the failures takes a whole rack at once
spot          nodes are taken away in groups with notice, and given back
monotone      one node every so often, never repaired: ReCycle's and Oobleck's evaluation
at once       a share of the nodes is missing from the start
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from everstep.core.errors import ConfigError
from everstep.sim.trace import Trace, make_trace

Row = tuple[float, int, bool]
Draw = Callable[[np.random.Generator], float]


class Kind(StrEnum):
    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    RACKS = "racks"
    SPOT = "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    mtbf_s: float
    """Of one node, running."""

    repair_s: float
    """On average; drawn from an exponential distribution."""

    shape: float = 0.7
    """Of the Weibull distribution. Below 1 is infant mortality."""

    rack_nodes: int = 8
    rack_fraction: float = 0.2
    """Of the failures, those that take the whole rack."""

    group_nodes: int = 4
    """Taken away together by a spot market, at most."""

    notice_s: float = 120.0
    """Two minutes, as AWS gives; GCP gives 30 s."""

    def __post_init__(self) -> None:
        for field in ("mtbf_s", "repair_s", "shape"):
            if not 0 < getattr(self, field) < math.inf:
                raise ConfigError(field, getattr(self, field), "must be a positive number")
        for field in ("rack_nodes", "group_nodes"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
        if not 0 <= self.rack_fraction <= 1:
            raise ConfigError("rack_fraction", self.rack_fraction, "must be between 0 and 1")


def generate(kind: Kind, rates: Rates, *, num_nodes: int, duration_s: float, seed: int) -> Trace:
    rows = _rows(kind, np.random.default_rng(seed), rates, num_nodes, duration_s)
    return make_trace(
        rows,
        name=f"{kind}, seed {seed}",
        num_nodes=num_nodes,
        duration_s=duration_s,
        notice_s=rates.notice_s if kind is Kind.SPOT else 0.0,
    )


def _rows(
    kind: Kind, rng: np.random.Generator, rates: Rates, num_nodes: int, duration_s: float
) -> list[Row]:
    match kind:
        case Kind.EXPONENTIAL:
            return _independent(rng, rates, num_nodes, duration_s, shape=1.0)
        case Kind.WEIBULL:
            return _independent(rng, rates, num_nodes, duration_s, shape=rates.shape)
        case Kind.RACKS:
            return _racks(rng, rates, num_nodes, duration_s)
        case Kind.SPOT:
            return _spot(rng, rates, num_nodes, duration_s)


def monotone(
    *, every_s: float, num_nodes: int, duration_s: float, seed: int, at_most: int | None = None
) -> Trace:
    """A node is removed every `every_s`, in random order, until `at_most` (half) are gone."""
    if not 0 < every_s < math.inf:
        raise ConfigError("--every", every_s, "must be a positive time")
    order = np.random.default_rng(seed).permutation(num_nodes).tolist()
    limit = num_nodes // 2 if at_most is None else at_most
    rows = [(every_s * (turn + 1), node, True) for turn, node in enumerate(order[:limit])]
    name = f"one lost every {every_s / 3600:g} h"
    return make_trace(rows, name=name, num_nodes=num_nodes, duration_s=duration_s)


def at_once(fraction: float, *, num_nodes: int, duration_s: float, seed: int) -> Trace:
    """The share of nodes that is lost right after the start, for good."""
    if not 0 <= fraction < 1:
        raise ConfigError("fraction", fraction, "must be at least 0 and below 1")
    order = np.random.default_rng(seed).permutation(num_nodes).tolist()
    lost = order[: round(fraction * num_nodes)]
    name = f"{fraction:.0%} lost"
    return make_trace(
        [(1.0, node, True) for node in lost], name=name, num_nodes=num_nodes, duration_s=duration_s
    )


def _independent(
    rng: np.random.Generator, rates: Rates, num_nodes: int, duration_s: float, *, shape: float
) -> list[Row]:
    scale_s = rates.mtbf_s / math.gamma(1 + 1 / shape)
    rows: list[Row] = []
    for node in range(num_nodes):
        time_s = 0.0
        while True:
            time_s += scale_s * float(rng.weibull(shape))
            if time_s >= duration_s:
                break
            back_s = time_s + rates.repair_s * float(rng.exponential())
            rows += [(time_s, node, True), (back_s, node, False)]
            time_s = back_s
    return rows


def _racks(rng: np.random.Generator, rates: Rates, num_nodes: int, duration_s: float) -> list[Row]:
    """As many node losses on average as without racks: a rack counts for its nodes."""
    mean_size = 1 + rates.rack_fraction * (min(rates.rack_nodes, num_nodes) - 1)
    every_s = rates.mtbf_s / num_nodes * mean_size

    def lose(rng: np.random.Generator) -> list[int]:
        node = int(rng.integers(num_nodes))
        if rng.random() >= rates.rack_fraction:
            return [node]
        first = node - node % rates.rack_nodes
        return list(range(first, min(first + rates.rack_nodes, num_nodes)))

    return _together(rng, rates, duration_s, every_s=every_s, lose=lose)


def _spot(rng: np.random.Generator, rates: Rates, num_nodes: int, duration_s: float) -> list[Row]:
    most = min(rates.group_nodes, num_nodes)
    every_s = rates.mtbf_s / num_nodes * (1 + most) / 2

    def lose(rng: np.random.Generator) -> list[int]:
        size = int(rng.integers(1, most + 1))
        return [int(node) for node in rng.choice(num_nodes, size=size, replace=False)]

    return _together(rng, rates, duration_s, every_s=every_s, lose=lose)


def _together(
    rng: np.random.Generator,
    rates: Rates,
    duration_s: float,
    *,
    every_s: float,
    lose: Callable[[np.random.Generator], list[int]],
) -> list[Row]:
    """Groups go at one moment; each node comes back on its own. A node that is down already when
    its group goes stays down as long as it would have."""
    rows: list[Row] = []
    down_until: dict[int, float] = {}
    time_s = every_s * float(rng.exponential())
    while time_s < duration_s:
        for node in lose(rng):
            back_s = time_s + rates.repair_s * float(rng.exponential())
            if down_until.get(node, -1.0) < time_s:
                rows += [(time_s, node, True), (back_s, node, False)]
                down_until[node] = back_s
        time_s += every_s * float(rng.exponential())
    return rows
