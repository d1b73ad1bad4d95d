"""What every system is given: the job, its cluster, and what is known of failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from everstep.core.errors import ConfigError
from everstep.sim.account import Account
from everstep.sim.constants import Constants
from everstep.sim.job import Job
from everstep.sim.periods import PLAN_BUDGET
from everstep.sim.saving import SaveCosts, SavePolicy, YoungDaly
from everstep.sim.trace import HOUR_S, Trace


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    job: Job
    failures: Failures
    workers_per_node: int = 1
    num_nodes: int | None = None
    """More than the job needs wait as extra ones; as many as it needs when not given."""

    constants: Constants = field(default_factory=Constants)
    policy: SavePolicy = field(default_factory=YoungDaly)
    num_spares: int | None = None
    """Nodes; one replica's worth when not given."""

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

    @property
    def copy_s(self) -> float:
        """One worker's state over the network."""
        return max(self.job.stage_state_bytes()) / self.job.links.network

    def save_costs(self, step_s: float) -> SaveCosts:
        """The same engine for everybody: each device writes its share of one replica's state, and
        the replicas share the work of writing."""
        job = self.job
        state_bytes = max(job.stage_state_bytes())
        copy_s = state_bytes / job.links.pinned_copy
        return SaveCosts(
            step_s=step_s,
            stall_s=self.constants.checkpoint_stall_fraction * copy_s,
            durable_s=copy_s + state_bytes / job.links.disk,
            load_s=state_bytes / job.links.disk,
        )

    def start_saving(self, account: Account, step_s: float) -> None:
        """Tells the account how often to save when a step takes so long. Only failures that forced
        a roll-back count, those seen so far and the prior."""
        job, constants = self.job, self.constants
        prior_s = constants.mtbf_device_hours * HOUR_S / (job.num_workers * job.devices_per_worker)
        weight = constants.prior_weight
        rate = (weight + account.num_roll_backs) / (weight * prior_s + account.now_s)
        costs = self.save_costs(step_s)
        interval = self.policy.interval_steps(costs, failures_per_second=rate)
        account.save_every(interval, stall_s=costs.stall_s, durable_s=costs.durable_s)


class System(Protocol):
    """One way to live with failures. Made for one setting, used for one trace."""

    name: str
    does_not_fit: str | None
    """Why its state does not fit in memory; then it is not run."""

    fault_free_step_s: float

    def begin(self, lost: list[int], account: Account) -> None:
        """`lost` are the workers that are not there."""

    def change(self, lost: list[int], joined: list[int], account: Account) -> None: ...
