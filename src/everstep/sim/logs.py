"""Replay from logs: which stages are rebuilt together, and how long that takes. [pure]

Workers log what they send over the boundaries between groups of stages (SWIFT's selective logging;
the groups are the live choice of recovery/grouping.py). With 3 groups of 6 stages:

    0   1 | 2   3 | 4   5     stage 2 has no worker left: 2 and 3 go back to their checkpoint and
            x   r             run again what came after it, with what 1 and 4 have logged

A log dies with the worker that kept it. If stage 4 has lost one since the checkpoint, what it sent
to 3 has a hole, so its group is replayed, too. Invariant: what is replayed ends at whole logs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from everstep.core.errors import ConfigError
from everstep.recovery.grouping import Boundary, Costs, StageCost, choose_groups
from everstep.sim.job import Job
from everstep.sim.memory import does_not_fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    ends: tuple[int, ...]
    """One behind the last stage of each."""

    @classmethod
    def of(cls, job: Job, number: int) -> Groups:
        """The best that a log of `number - 1` boundaries buys: fewer where more would not pay."""
        if not 1 <= number <= job.stages:
            rule = f"must be from 1 to the number of stages, which is {job.stages}; 0 for no logs"
            raise ConfigError("--logging", number, rule)
        grouping = choose_groups(_costs(job), budget_bytes=number - 1)
        return cls(ends=tuple(group.stop for group in grouping.groups))

    def replayed(self, gone: Collection[int], *, has_hole: Callable[[int], bool]) -> list[int]:
        """The stages to run again when those in `gone` have no worker left."""
        groups = [range(begin, end) for begin, end in zip((0, *self.ends), self.ends, strict=False)]
        needed = {n for n, group in enumerate(groups) if any(stage in group for stage in gone)}
        while True:
            more = {
                n
                for n, group in enumerate(groups)
                if n not in needed
                and (
                    (n + 1 in needed and has_hole(group[-1]))
                    or (n - 1 in needed and has_hole(group[0]))
                )
            }
            if not more:
                return [stage for n in sorted(needed) for stage in groups[n]]
            needed |= more


def logged_fraction(groups: Groups, job: Job) -> float:
    """Of the boundaries between stages."""
    return (len(groups.ends) - 1) / max(1, job.stages - 1)


def replay_step_s(
    job: Job, stages: Collection[int], *, num_live: int, num_seated: int, efficiency: float
) -> float:
    """One step of these stages, run by all that can help at once.

    Everybody waits anyway, so everybody helps who has room for a second stage's state; else only
    the `num_seated` workers that sit there. Helpers are spread over the stages and take every k-th
    micro-batch; there are no bubbles, as all inputs are there already. Logs are read meanwhile.
    """
    has_room = does_not_fit(job, state_factor=2.0) is None
    helpers = max(1, (num_live if has_room else num_seated) // len(stages))
    each = -(-job.batch_microbatches // min(helpers, job.batch_microbatches))
    compute_s = each * max(_seconds(job, stage) for stage in stages)
    read_s = each * 2 * job.boundary_bytes / job.links.network
    return max(compute_s / (efficiency if helpers > 1 else 1.0), read_s)


def _costs(job: Job) -> Costs:
    """As the live coordinator states them (recovery/rebuild.py). The same passes every boundary, so
    one byte stands for all that is kept of it, and the number of steps changes no choice."""
    update_s = job.durations().optimizer
    return Costs(
        stages=tuple(
            StageCost(replay_s=job.batch_microbatches * _seconds(job, stage), update_s=update_s)
            for stage in range(job.stages)
        ),
        boundaries=(Boundary(forward_bytes=1, backward_bytes=0),) * (job.stages - 1),
        microbatches=job.batch_microbatches,
        interval_steps=1,
        workers=job.num_workers,
    )


def _seconds(job: Job, stage: int) -> float:
    found = job.durations().stages[stage]
    return found.forward + found.input_gradient + found.weight_gradient
