"""What every system is given: the job, its cluster, and what is known of failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from everstep.checkpoint.policy import Costs, Policy
from everstep.core.errors import ConfigError
from everstep.sim.account import Account
from everstep.sim.constants import Constants
from everstep.sim.job import Job
from everstep.sim.periods import PLAN_BUDGET
from everstep.sim.saving import seen_rate, start_saving
from everstep.sim.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What is known of them beforehand: a system may plan with it, as with its own statistics."""

    losses_per_second: float
    mean_outage_s: float
    notice_s: float = 0.0

    @classmethod
    def of(cls, trace: Trace) -> Failures:
        return cls(
            losses_per_second=trace.losses_per_second(),
            mean_outage_s=trace.mean_outage_s(),
            notice_s=trace.notice_s,
        )


@dataclass(frozen=True, kw_only=True)  # no slots, because it remembers what is asked most
class Setting:
    job: Job
    failures: Failures
    workers_per_node: int = 1
    num_nodes: int | None = None
    """More than the job needs wait as extra ones; as many as it needs when not given."""

    constants: Constants = field(default_factory=Constants)
    policy: Policy | None = None
    """When to save, for all but the elastic restarts; each system's own when not given."""

    num_spares: int | None = None
    """Nodes; one replica's worth when not given."""

    log_groups: int = 0
    """Groups of stages that everstep logs the boundaries of; none when 0. With replicas there is
    seldom a stage without a live worker, so logs are off unless asked for."""

    plan_budget: int = PLAN_BUDGET

    def __post_init__(self) -> None:
        if self.workers_per_node < 1:
            raise ConfigError("workers per node", self.workers_per_node, "must be at least 1")
        if self.nodes * self.workers_per_node < self.job.num_workers:
            rule = f"{self.job.num_workers} workers need {self.needed_nodes} nodes"
            raise ConfigError("nodes", self.nodes, rule)

    @property
    def needed_nodes(self) -> int:
        return -(-self.job.num_workers // self.workers_per_node)

    @property
    def nodes(self) -> int:
        return self.needed_nodes if self.num_nodes is None else self.num_nodes

    @property
    def num_workers(self) -> int:
        """Of the cluster, those that wait included."""
        return self.nodes * self.workers_per_node

    def workers(self, nodes: Iterable[int]) -> list[int]:
        """Numbers of the workers on these nodes; node n runs the next `workers_per_node` ones."""
        size = self.workers_per_node
        return [node * size + slot for node in nodes for slot in range(size)]

    @property
    def noticing_s(self) -> float:
        return 0.0 if self.failures.notice_s > 0 else self.constants.notice_loss_s

    @cached_property
    def stage_bytes(self) -> float:
        """Of the largest stage, on one device."""
        return max(self.job.stage_state_bytes())

    @property
    def copy_s(self) -> float:
        """One worker's state over the network."""
        return self.stage_bytes / self.job.links.network

    @property
    def load_s(self) -> float:
        """A worker's state from disk."""
        return self.stage_bytes / self.job.links.disk

    def save_costs(self, step_s: float) -> Costs:
        """The same engine for everybody: each device writes its share of one replica's state, and
        the replicas share the work of writing."""
        copy_s = self.stage_bytes / self.job.links.pinned_copy
        return Costs(
            step_s=step_s,
            stall_s=self.constants.checkpoint_stall_fraction * copy_s,
            durable_s=copy_s + self.stage_bytes / self.job.links.disk,
            restore_s=self.load_s,
        )

    def start_saving(
        self, account: Account, step_s: float, *, policy: Policy, failure_rate: float | None = None
    ) -> None:
        """How often to save when a step takes so long. Unless the rate is given, only failures that
        forced a roll-back count, those seen so far and the prior."""
        num_devices = self.job.num_workers * self.job.devices_per_worker
        if failure_rate is None:
            failure_rate = seen_rate(
                account,
                num_devices=num_devices,
                prior_device_hours=self.constants.mtbf_device_hours,
            )
        start_saving(
            account,
            policy,
            self.save_costs(step_s),
            failure_rate=failure_rate,
            num_workers=self.job.num_workers,
        )


class System(Protocol):
    """One way to live with failures. Made for one setting, used for one trace."""

    name: str
    does_not_fit: str | None
    """Why its state does not fit in memory; then it is not run."""

    fault_free_step_s: float

    def begin(self, lost: list[int], account: Account) -> None:
        """`lost` are the workers that are not there."""

    def change(self, lost: list[int], joined: list[int], account: Account) -> None: ...
