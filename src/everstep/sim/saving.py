"""How often a system saves: the live policies, asked in virtual time.

A live job asks its policy after every step whether a checkpoint is due. As long as costs and rate
stay, the answer changes once from no to yes as the steps since the last checkpoint grow; so that
step is searched for, not walked to, and the account moves on by whole cycles of it. A simulated job
has no loss, so policies see no curve: `LostProgress`, the live default, then is Young and Daly's
rule under a budget. Nobody saves before the last checkpoint is durable. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from everstep.checkpoint.baselines import CheckFreq, EverySteps, YoungDaly
from everstep.checkpoint.failure_rate import FailureRate
from everstep.checkpoint.objectives import LostProgress
from everstep.checkpoint.policy import Costs, Policy, Situation
from everstep.core.errors import ConfigError
from everstep.sim.account import Account, Cause

POLICIES: dict[str, Policy] = {
    "lost-progress": LostProgress(),
    "young-daly": YoungDaly(),
    "checkfreq": CheckFreq(),
}

NEVER_STEPS = 1 << 40
"""Not due by then is never."""


def policy_named(text: str) -> Policy:
    """A name, or a number of steps."""
    if text in POLICIES:
        return POLICIES[text]
    if text.isdecimal() and int(text):
        return EverySteps(int(text))
    raise ConfigError("--policy", text, f"must be {', '.join(POLICIES)} or a number of steps")


def start_saving(
    account: Account, policy: Policy, costs: Costs, *, failure_rate: float, num_workers: int
) -> None:
    """Asks the policy from the last checkpoint on, and tells the account how often to save."""

    def is_due(steps_since: int) -> bool:
        return policy.is_due(
            situation_after(
                account,
                steps_since,
                costs=costs,
                failure_rate=failure_rate,
                num_workers=num_workers,
            )
        )

    interval = first_due(is_due, guess=account.interval_s // costs.step_s)
    frequent = math.ceil(costs.durable_s / costs.step_s)
    account.save_every(max(interval, frequent), stall_s=costs.stall_s, durable_s=costs.durable_s)


def situation_after(
    account: Account, steps_since: int, *, costs: Costs, failure_rate: float, num_workers: int
) -> Situation:
    """What a live worker would see so many steps after a checkpoint that is taken now; its stall is
    part of the step after it, as the live system's clock has it."""
    seconds_since = steps_since * costs.step_s + costs.stall_s
    return Situation(
        step=int(account.steps) + steps_since,
        steps_since=steps_since,
        seconds=account.now_s + seconds_since,
        seconds_since=seconds_since,
        costs=costs,
        failure_rate=failure_rate,
        workers=num_workers,
        spent_s=account.down_s[Cause.STALL],
        num_taken=account.num_saves,
    )


def first_due(is_due: Callable[[int], bool], *, guess: float = 1) -> float:
    """The first number of steps, from 1 on, that is due; infinity for never. Near the guess it
    takes a handful of questions."""
    low, high = 0, int(guess) if 1 <= guess < NEVER_STEPS else 1
    width = 1
    while not is_due(high):
        low, high = high, high + width
        width *= 2
        if low > NEVER_STEPS:
            return math.inf
    while high - width > low and is_due(high - width):
        high -= width
        width *= 2
    low = max(low, high - width)
    return low + 1 + bisect_left(range(low + 1, high), 1, key=is_due)


def seen_rate(account: Account, *, num_devices: int, prior_device_hours: float) -> float:
    """Failures per second that force a roll-back, by the live estimate: a prior and those seen.

    Worked out anew when one was seen, or when the time has grown by 2 %: the best interval goes
    with the root of the rate, so it is within 1 %.
    """
    growth = math.floor(math.log1p(account.now_s) / _RATE_GROWTH)
    return _rate(
        FailureRate(
            failures=account.num_roll_backs,
            worker_seconds=math.expm1(growth * _RATE_GROWTH) * num_devices,
            prior_worker_hours=prior_device_hours,
        ),
        num_devices,
    )


_RATE_GROWTH = math.log(1.02)


@lru_cache(maxsize=4096)
def _rate(seen: FailureRate, num_devices: int) -> float:
    return seen.per_second(num_devices)
