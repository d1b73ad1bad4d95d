"""Plays a recorded run to a policy, step by step, and notes where it would have saved.

The policy is asked exactly as in a live job: it sees the past only, with the curve that was fitted
to it by then. For planning, for comparing policies and for the simulator. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everstep.checkpoint.curve import Curve, LossHistory
from everstep.checkpoint.curve_fit import Floats
from everstep.checkpoint.outlook import Outlook, look_back
from everstep.checkpoint.policy import Costs, Policy, Situation

_SMOOTHING = 0.1
"""Neighbours on either side that the settled loss is averaged over, as a share of the step..."""
_MOST_NEIGHBOURS = 75
"""...and at most so many: the beginning is steep and the rest is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run without failures; one entry per step."""

    losses: Floats
    curves: tuple[Curve | None, ...]
    """What was known after each step."""
    seconds: Floats
    workers: Floats
    failure_rate: Floats
    """Per second, of all workers together."""
    costs: Costs
    loader_length: int | None = None

    def outlook(self) -> Outlook:
        """The whole run as it turned out, for placing checkpoints with hindsight."""
        return look_back(
            settled(self.losses),
            seconds=self.seconds,
            failure_rate=self.failure_rate,
            stall_s=self.costs.stall_s,
            workers=self.workers,
        )


def watch(losses: Floats) -> tuple[Curve | None, ...]:
    """The curve known after each step."""
    history = LossHistory()
    curves = []
    for step, loss in enumerate(losses, start=1):
        history.add(step, float(loss))
        curves.append(history.curve())
    return tuple(curves)


def settled(losses: Floats) -> Floats:
    """The loss without its noise, and without what was lost again: before step 1, then after each.

    The best mean over neighbouring steps so far.
    """
    sums = np.concatenate(([0.0], np.cumsum(losses)))
    index = np.arange(len(losses))
    reach = np.minimum(_MOST_NEIGHBOURS, (_SMOOTHING * index).astype(np.int64))
    low, high = index - reach, np.minimum(index + reach + 1, len(losses))
    means = (sums[high] - sums[low]) / (high - low)
    return np.minimum.accumulate(np.concatenate((means[:1], means)))


def rehearse(policy: Policy, run: Recording, *, is_end_known: bool = True) -> tuple[int, ...]:
    """The steps after which `policy` saves. Not asked after the last: the end is saved anyway."""
    num_steps, costs = len(run.losses), run.costs
    ends_s = np.cumsum(run.seconds)
    marks: list[int] = []
    last = 0
    for step in range(1, num_steps):
        at = step - 1
        stalled_s = len(marks) * costs.stall_s
        situation = Situation(
            step=step,
            steps_since=step - last,
            seconds=float(ends_s[at]) + stalled_s,
            seconds_since=float(ends_s[at] - (ends_s[last - 1] if last else 0.0)),
            costs=Costs(
                step_s=float(run.seconds[at]),
                stall_s=costs.stall_s,
                durable_s=costs.durable_s,
                restore_s=costs.restore_s,
                size_bytes=costs.size_bytes,
            ),
            failure_rate=float(run.failure_rate[at]),
            total_steps=num_steps if is_end_known else None,
            workers=int(run.workers[at]),
            curve=run.curves[at],
            spent_s=stalled_s,
            num_taken=len(marks),
            loader_length=run.loader_length,
        )
        if policy.is_due(situation):
            marks.append(step)
            last = step
    return tuple(marks)
