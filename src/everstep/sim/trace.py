"""A trace: when which node of a cluster is lost and when it is there again.

Plain arrays, sorted. Knows no job. Invariant: every node's changes alternate, so a change is news.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everstep.core.errors import ConfigError

Times = NDArray[np.float64]
Nodes = NDArray[np.int64]
Flags = NDArray[np.bool_]

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """All that happens to the cluster at one moment."""

    time_s: float
    lost: tuple[int, ...]
    joined: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    name: str
    num_nodes: int
    duration_s: float
    time_s: Times
    node: Nodes
    is_loss: Flags
    starts_down: Flags
    """Per node: not there when the trace begins."""

    notice_s: float = 0.0
    """How long before a loss it is announced, as spot markets do."""

    @property
    def num_losses(self) -> int:
        return int(self.is_loss.sum())

    def changes(self) -> Iterator[Change]:
        """Rows of equal time are one change: a rack that fails is noticed once."""
        starts = np.flatnonzero(np.diff(self.time_s, prepend=-1.0) > 0).tolist()
        ends = [*starts[1:], len(self.time_s)]
        times, nodes, losses = self.time_s.tolist(), self.node.tolist(), self.is_loss.tolist()
        for start, end in zip(starts, ends, strict=False):
            first = {nodes[row]: losses[row] for row in range(end - 1, start - 1, -1)}
            last = {nodes[row]: losses[row] for row in range(start, end)}
            # Lost and back at once is both, and a new machine; back and lost at once is nothing.
            yield Change(
                time_s=times[start],
                lost=tuple(node for node in last if first[node]),
                joined=tuple(node for node in last if not last[node]),
            )

    def up_node_seconds(self) -> float:
        """Summed over the nodes: what is paid for."""
        sign = np.where(self.is_loss, -1.0, 1.0)
        up_at_start = float((~self.starts_down).sum())
        return up_at_start * self.duration_s + float((sign * (self.duration_s - self.time_s)).sum())

    def mean_outage_s(self) -> float:
        """How long a loss lasts; to the end of the trace for those that are not repaired."""
        down_s = self.num_nodes * self.duration_s - self.up_node_seconds()
        num_outages = self.num_losses + int(self.starts_down.sum())
        return down_s / num_outages if num_outages else self.duration_s

    def losses_per_second(self) -> float:
        """Moments of loss, of the whole cluster: a rack that fails at once counts once."""
        moments = np.unique(self.time_s[self.is_loss])
        return len(moments) / self.duration_s


def make_trace(
    rows: Sequence[tuple[float, int, bool]],
    *,
    name: str,
    num_nodes: int,
    duration_s: float,
    starts_down: Sequence[int] = (),
    notice_s: float = 0.0,
) -> Trace:
    """From rows of (time, node, is it a loss) in any order; what is not news is dropped, and so is
    what comes at or after the end."""
    if num_nodes < 1:
        raise ConfigError("nodes", num_nodes, "must be at least 1")
    if not 0 < duration_s < float("inf"):
        raise ConfigError("duration", duration_s, "must be a positive number of seconds")
    down = np.zeros(num_nodes, dtype=np.bool_)
    down[list(starts_down)] = True
    is_down = down.copy()
    kept = []
    for time_s, node, is_loss in sorted(rows, key=lambda row: row[0]):
        if is_down[node] != is_loss and 0 <= time_s < duration_s:
            is_down[node] = is_loss
            kept.append((time_s, node, is_loss))
    return Trace(
        name=name,
        num_nodes=num_nodes,
        duration_s=duration_s,
        time_s=np.array([row[0] for row in kept], dtype=np.float64),
        node=np.array([row[1] for row in kept], dtype=np.int64),
        is_loss=np.array([row[2] for row in kept], dtype=np.bool_),
        starts_down=down,
        notice_s=notice_s,
    )


def rows_of(trace: Trace) -> list[tuple[float, int, bool]]:
    return list(
        zip(trace.time_s.tolist(), trace.node.tolist(), trace.is_loss.tolist(), strict=True)
    )


def cut(trace: Trace, duration_s: float) -> Trace:
    """Its beginning."""
    return make_trace(
        rows_of(trace),
        name=trace.name,
        num_nodes=trace.num_nodes,
        duration_s=min(duration_s, trace.duration_s),
        starts_down=np.flatnonzero(trace.starts_down).tolist(),
        notice_s=trace.notice_s,
    )


def fit(trace: Trace, num_nodes: int, *, seed: int) -> Trace:
    """The same failures per node on a cluster of another size.

    A smaller cluster gets nodes drawn from the trace. A larger one uses each node again, its
    history turned round in time by an equal share for each further use, so that copies of a node
    do not fail together. A turned history starts in the state it has there.
    """
    if num_nodes == trace.num_nodes:
        return trace
    rng = np.random.default_rng(seed)
    rounds = -(-num_nodes // trace.num_nodes)
    source = np.concatenate([rng.permutation(trace.num_nodes) for _ in range(rounds)])[:num_nodes]
    history: list[list[tuple[float, bool]]] = [[] for _ in range(trace.num_nodes)]
    for time_s, node, is_loss in rows_of(trace):
        history[node].append((time_s, is_loss))
    rows, down = [], []
    for node, origin in enumerate(source.tolist()):
        turn_s = (node // trace.num_nodes) * trace.duration_s / rounds
        own, starts_down = _turned(
            history[origin], bool(trace.starts_down[origin]), turn_s, trace.duration_s
        )
        rows += [(time_s, node, is_loss) for time_s, is_loss in own]
        if starts_down:
            down.append(node)
    return make_trace(
        rows,
        name=trace.name,
        num_nodes=num_nodes,
        duration_s=trace.duration_s,
        starts_down=down,
        notice_s=trace.notice_s,
    )


def _turned(
    history: Sequence[tuple[float, bool]], starts_down: bool, turn_s: float, duration_s: float
) -> tuple[list[tuple[float, bool]], bool]:
    """The history as seen from `turn_s` on, then from its beginning again."""
    if turn_s == 0:
        return list(history), starts_down
    before = [row for row in history if row[0] <= turn_s]
    after = [row for row in history if row[0] > turn_s]
    down_at_turn = before[-1][1] if before else starts_down
    seam = duration_s - turn_s
    rows = [(time_s - turn_s, is_loss) for time_s, is_loss in after]
    rows.append((seam, starts_down))  # not news when it is in that state; then it is dropped
    rows += [(time_s + seam, is_loss) for time_s, is_loss in before]
    return rows, down_at_turn
