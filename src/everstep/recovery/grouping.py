"""Decides which boundaries between stages are logged: SWIFT's selective logging. Pure.

Stages are cut into groups of neighbours and only what passes between groups is logged. A loss
replays the whole group it falls into, from the logs on both sides of the group:

    stage       0     1     2     3     4
    boundary       0     1     2     3
    groups     [ 0     1 ] [ 2 ] [ 3    4 ]      logged: boundaries 1 and 2

Fewer logs are larger groups and longer recoveries. Of all groupings whose logs fit into a budget
the one with the shortest expected recovery is found, exactly: the best groupings of the first n
stages, a frontier of bytes against seconds, are those of fewer stages with one group more. The
same group adds the same to each of them, so one that is beaten in both stays beaten.
Knows neither how a log is written nor what has died; measured sizes and times come in as `Costs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from everstep.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What it takes to have one stage's state back."""

    replay_s: float
    """Forward and backward of all micro-batches of a step by one worker, without bubbles."""

    update_s: float = 0.0
    """What a step costs besides: the optimizer, the sum of gradients. Helpers do not shorten it."""

    load_s: float = 0.0
    """Of its checkpoint."""

    failure_rate: float = 1.0
    """How often it loses its last copy, in any unit: only the proportions count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What passes between a stage and the next in one step. Either side may be the one to die,
    so a logged boundary is logged in both directions."""

    forward_bytes: int
    backward_bytes: int

    @property
    def step_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All that the choice of groups depends on."""

    stages: tuple[StageCost, ...]
    boundaries: tuple[Boundary, ...]
    """Boundary b lies between stage b and stage b + 1."""

    microbatches: int
    """Of a step, of all replicas together."""

    interval_steps: int
    """Steps of which the log is kept: from one checkpoint until the next one is durable."""

    workers: int | None = None
    """Live ones, replacements included. Default: one per stage."""

    helpers: int | None = None
    """Most workers that help the replacement. Default: all others."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("stages", "empty", "there must be at least one")
        if len(self.boundaries) != len(self.stages) - 1:
            rule = f"{len(self.stages)} stages have {len(self.stages) - 1} boundaries between them"
            raise ConfigError("boundaries", f"of length {len(self.boundaries)}", rule)
        for path, count, least in self._counts():
            if count < least:
                raise ConfigError(path, count, f"must be at least {least}")
        for path, value in self._measures():
            if not math.isfinite(value) or value < 0:
                raise ConfigError(path, value, "must be a finite number, not negative")
        if not any(stage.failure_rate for stage in self.stages):
            raise ConfigError("failure_rate", "0 for every stage", "one must be above 0")

    def _counts(self) -> Iterator[tuple[str, int, int]]:
        yield "microbatches", self.microbatches, 1
        yield "interval_steps", self.interval_steps, 1
        if self.workers is not None:
            yield "workers", self.workers, len(self.stages)
        if self.helpers is not None:
            yield "helpers", self.helpers, 0
        for number, boundary in enumerate(self.boundaries):
            yield f"boundaries[{number}].forward_bytes", boundary.forward_bytes, 0
            yield f"boundaries[{number}].backward_bytes", boundary.backward_bytes, 0

    def _measures(self) -> Iterator[tuple[str, float]]:
        for number, stage in enumerate(self.stages):
            yield f"stages[{number}].replay_s", stage.replay_s
            yield f"stages[{number}].update_s", stage.update_s
            yield f"stages[{number}].load_s", stage.load_s
            yield f"stages[{number}].failure_rate", stage.failure_rate

    @property
    def replayed_steps(self) -> float:
        """Expected: a failure falls on any moment between two checkpoints alike."""
        return self.interval_steps / 2

    def kept_bytes(self, boundary: int) -> int:
        """By both its sides together, when the log is at its longest."""
        return self.boundaries[boundary].step_bytes * self.interval_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Which stages are replayed together, and what that costs in bytes and in seconds."""

    groups: tuple[range, ...]
    bytes: int
    """Kept by all workers together."""

    expected_s: float
    """Of one recovery, given that some stage is lost."""

    @property
    def logged(self) -> frozenset[int]:
        """The boundaries between groups."""
        return frozenset(group.start - 1 for group in self.groups[1:])

    def group_of(self, stage: int) -> range:
        return next(group for group in self.groups if stage in group)


def choose_groups(costs: Costs, budget_bytes: int) -> Grouping:
    """The shortest expected recovery that so many bytes buy; of equal ones the smallest log."""
    if budget_bytes < 0:
        raise ConfigError("budget_bytes", budget_bytes, "must not be negative")
    return _frontier(costs, budget_bytes)[-1]


def tradeoff(costs: Costs) -> tuple[Grouping, ...]:
    """Every grouping that is not beaten in both bytes and seconds, from the smallest log on."""
    return _frontier(costs, math.inf)


def recovery_s(costs: Costs, group: range) -> float:
    """From the replacement's start until the group is where the others wait.

    As it is done (execute/replay.py): k workers load all stages of the group, and each runs its
    share of the M micro-batches through all of them, without bubbles. Where everybody's going back
    to the checkpoint is faster, that is what happens, at the pace of the whole pipeline.

        replay       sum of load_s + steps * (ceil(M / k) / M * sum of replay_s + sum of update_s)
        going back   the longest load_s + steps * (a step of all stages, with its bubbles)
    """
    back_s = _going_back_s(costs)
    if len(group) == len(costs.stages):
        return back_s
    members = [costs.stages[stage] for stage in group]
    share = -(-costs.microbatches // _num_replayers(costs)) / costs.microbatches
    step_s = sum(share * stage.replay_s + stage.update_s for stage in members)
    load_s = sum(stage.load_s for stage in members)
    return min(back_s, load_s + costs.replayed_steps * step_s)


def _going_back_s(costs: Costs) -> float:
    replays = [stage.replay_s for stage in costs.stages]
    filled_s = sum(replays) + (costs.microbatches - 1) * max(replays)
    step_s = filled_s / costs.microbatches + max(stage.update_s for stage in costs.stages)
    return max(stage.load_s for stage in costs.stages) + costs.replayed_steps * step_s


def _num_replayers(costs: Costs) -> int:
    """The replacement and those who help it; the rest of its group waits as well, and can."""
    workers = len(costs.stages) if costs.workers is None else costs.workers
    helpers = workers - 1 if costs.helpers is None else min(costs.helpers, workers - 1)
    return min(1 + helpers, costs.microbatches)


class _Point(NamedTuple):
    """A grouping of the first stages, as a chain of groups from the last one back."""

    bytes: int
    expected_s: float
    num_groups: int
    start: int
    """Of its last group."""

    before: _Point | None


def _frontier(costs: Costs, budget_bytes: float) -> tuple[Grouping, ...]:
    """Bytes rise and seconds fall along it.

    It is short when boundaries have sizes in common, as those of a transformer do. When they have
    nothing in common it grows like that of a knapsack (Nemhauser and Ullmann, 1969).
    """
    best: list[list[_Point]] = [[_Point(0, 0.0, 0, 0, None)]]
    for end in range(1, len(costs.stages) + 1):
        longer = [
            point
            for start in range(end)
            for point in _with_group(best[start], range(start, end), costs)
            if point.bytes <= budget_bytes
        ]
        best.append(_undominated(longer))
    return tuple(_grouping(point, len(costs.stages)) for point in best[-1])


def _with_group(points: Sequence[_Point], group: range, costs: Costs) -> Iterator[_Point]:
    more_bytes = costs.kept_bytes(group.start - 1) if group.start else 0
    more_s = _share_of_failures(costs, group) * recovery_s(costs, group)
    for point in points:
        yield _Point(
            point.bytes + more_bytes,
            point.expected_s + more_s,
            point.num_groups + 1,
            group.start,
            point,
        )


def _share_of_failures(costs: Costs, group: range) -> float:
    total = sum(stage.failure_rate for stage in costs.stages)
    return sum(costs.stages[stage].failure_rate for stage in group) / total


def _undominated(points: Sequence[_Point]) -> list[_Point]:
    """Those that are faster than all that is not larger; of equals the one of fewest groups."""
    kept: list[_Point] = []
    for point in sorted(points, key=itemgetter(0, 1, 2)):
        if not kept or point.expected_s < kept[-1].expected_s:
            kept.append(point)
    return kept


def _grouping(last: _Point, num_stages: int) -> Grouping:
    groups: list[range] = []
    end, point = num_stages, last
    while point.before is not None:
        groups.append(range(point.start, end))
        end, point = point.start, point.before
    return Grouping(groups=tuple(reversed(groups)), bytes=last.bytes, expected_s=last.expected_s)
