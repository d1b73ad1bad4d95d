"""`everstep plan --logging`: what a byte of log buys, and the groups that a budget chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeVar

from everstep.cli.print_logging import Tradeoff
from everstep.core.errors import ConfigError
from everstep.core.sizes import parse_bytes
from everstep.recovery.grouping import Boundary, Costs, StageCost, choose_groups, tradeoff
from everstep.schedule.durations import Durations

UNLIMITED = "all"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingFlags:
    """As they were given; None for one that was not."""

    budget: str | None
    boundary_bytes: str | None
    interval: int | None
    replay: str | None
    load: str | None
    failures: str | None
    helpers: int | None

    def check_beside(self, **others: object) -> None:
        """`others`: flags about schedules, by their names; false for one that was not given."""
        if self.budget is None:
            refused = {field.name: getattr(self, field.name) for field in fields(self)}
            rule = "means something only with --logging"
        else:
            refused = {name: value or None for name, value in others.items()}
            rule = "means nothing with --logging"
        for name, value in refused.items():
            if value is not None:
                shown = " ".join(value) if isinstance(value, list) else value
                raise ConfigError(f"--{name.replace('_', '-')}", shown, rule)


def find_tradeoff(
    budget: str, flags: LoggingFlags, *, durations: Durations | None, shape: tuple[int, int, int]
) -> Tradeoff:
    """`shape`: replicas, stages, micro-batches per replica. `durations` are in seconds here."""
    costs = _costs(flags, durations, shape)
    curve = tradeoff(costs)
    budget_bytes = None if budget == UNLIMITED else parse_bytes(budget, field="--logging")
    chosen = curve[-1] if budget_bytes is None else choose_groups(costs, budget_bytes)
    return Tradeoff(costs=costs, budget_bytes=budget_bytes, curve=curve, chosen=chosen)


def _costs(flags: LoggingFlags, durations: Durations | None, shape: tuple[int, int, int]) -> Costs:
    replicas, num_stages, microbatches = shape
    for flag, count in zip(("--replicas", "--stages", "--microbatches"), shape, strict=True):
        if count < 1:
            raise ConfigError(flag, count, "must be at least 1")
    if flags.interval is None:
        rule = "--logging needs the steps between two checkpoints, whose logs are kept"
        raise ConfigError("--interval", "not given", rule)
    if flags.interval < 1:
        raise ConfigError("--interval", flags.interval, "must be at least 1")
    if flags.helpers is not None and flags.helpers < 0:
        raise ConfigError("--helpers", flags.helpers, "must not be negative")
    replays = _replays(flags.replay, durations, num_stages, replicas * microbatches)
    loads = _per_stage(flags.load or "0", num_stages, field="--load")
    rates = _per_stage(flags.failures or "1", num_stages, field="--failures")
    if not any(rates):
        raise ConfigError("--failures", flags.failures, "one of them must be above 0")
    update_s = durations.synchronization if durations is not None else 0.0
    return Costs(
        stages=tuple(
            StageCost(replay_s=replay_s, update_s=update_s, load_s=load_s, failure_rate=rate)
            for replay_s, load_s, rate in zip(replays, loads, rates, strict=True)
        ),
        boundaries=_boundaries(flags.boundary_bytes, num_stages - 1),
        microbatches=replicas * microbatches,
        interval_steps=flags.interval,
        workers=replicas * num_stages,
        helpers=flags.helpers,
    )


def _replays(
    replay: str | None, durations: Durations | None, num_stages: int, microbatches: int
) -> tuple[float, ...]:
    if replay is not None:
        if durations is not None:
            raise ConfigError("--replay", replay, "the durations say it already; give one of both")
        return _per_stage(replay, num_stages, field="--replay")
    if durations is None:
        rule = "--logging needs the seconds of a step on each stage: --replay, or --durations F,B,W"
        raise ConfigError("--replay", "not given", rule)
    if len(durations.stages) != num_stages:
        rule = f"must have {num_stages}, one for each stage"
        raise ConfigError("profile.stages", f"of length {len(durations.stages)}", rule)
    return tuple(microbatches * stage.total for stage in durations.stages)


def _per_stage(text: str, num_stages: int, *, field: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        rule = "must be a number, or one per stage such as 1.5,1.2,1.2"
        raise ConfigError(field, text, rule) from None
    if not all(0 <= number < math.inf for number in numbers):
        raise ConfigError(field, text, "must be finite, not negative")
    return _spread(numbers, num_stages, field=field, text=text, of="stages")


def _boundaries(text: str | None, number: int) -> tuple[Boundary, ...]:
    if text is None:
        rule = "--logging needs what passes a boundary in a step, such as 12MB"
        raise ConfigError("--boundary-bytes", "not given", rule)
    sizes = tuple(_boundary(part, text) for part in text.split(","))
    return _spread(sizes, number, field="--boundary-bytes", text=text, of="boundaries")


def _boundary(part: str, text: str) -> Boundary:
    """`12MB` in each direction, or `12MB:6MB` forward and backward."""
    forward, colon, backward = part.partition(":")
    try:
        forward_bytes = parse_bytes(forward, field="--boundary-bytes")
        backward_bytes = parse_bytes(backward if colon else forward, field="--boundary-bytes")
    except ConfigError:
        rule = "must be sizes such as 12MB, or 12MB:6MB forward and backward, one or one a boundary"
        raise ConfigError("--boundary-bytes", text, rule) from None
    return Boundary(forward_bytes=forward_bytes, backward_bytes=backward_bytes)


def _spread(values: tuple[T, ...], number: int, *, field: str, text: str, of: str) -> tuple[T, ...]:
    if len(values) == 1:
        return values * number
    if len(values) != number:
        raise ConfigError(field, text, f"must be one for all, or one for each of {number} {of}")
    return values
