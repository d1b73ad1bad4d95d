"""What recovering costs, one name each, with its origin. Seconds unless the name says otherwise.

Shared ones are the same for every system; the others belong to one. All may be overridden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from everstep.checkpoint.failure_rate import PRIOR_WORKER_HOURS
from everstep.core.errors import ConfigError
from everstep.membership.silence import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    # Shared.
    notice_loss_s: float = Patience().lose_after_s
    """A node that dies closes no connection: it is missed by its silence. The live system's own
    limit, and also torchft's default. Zero for losses that were announced."""

    groups_s: float = 1.0
    """To stop everybody and to form communication groups again. An assumption: the live system
    takes 0.2 s for 12 processes on 2 cores; large NCCL groups take seconds."""

    groups_per_worker_s: float = 0.002
    """The part of it that grows: 8 s for 4,096 workers. An assumption, too."""

    checkpoint_stall_fraction: float = 0.15
    """Of the copy to host memory: the bar of everstep's own engine, granted to everybody."""

    mtbf_device_hours: float = PRIOR_WORKER_HOURS
    """Between failures that force a roll-back, before any was seen: the live system's prior, which
    is what large jobs report. What is seen soon outweighs it, by the live estimate."""

    # everstep
    join_boundary_steps: float = 1.5
    """A new worker comes in after the step that follows the open one: one to two steps from now."""

    everstep_restart_s: float = 10.0
    """To start all processes again, which is how it loads a checkpoint. An assumption: torchrun
    takes 4.0 to 10.6 s on one node, measured."""

    logging_fraction: float = 0.01
    """By how much logging all boundaries slows a step: the bar of the live system. In proportion to
    the boundaries that are logged."""

    replay_efficiency: float = 0.8
    """Of several helpers that replay at once: the bar of the live system."""

    # elastic restart and spares
    restart_s: float = 47.0
    """Lost agent until all workers run again: torchrun measured, 46 to 48 s."""

    # Oobleck
    oobleck_rebuild_s: float = 0.4
    """Templates, beside groups and copies. The least a third party measured for all of it together
    (0.4 to 3.6 s for 1.3B and 2.7B, reported), so generous."""

    # Bamboo
    bamboo_slowdown: float = 1.285
    """Redundant computation without failures: 1.26 to 1.31 (reported), the middle."""

    bamboo_state_factor: float = 2.0
    bamboo_rendezvous_s: float = 30.0
    bamboo_node_creation_s: float = 45.0

    # torchft
    torchft_quorum_s: float = 0.14
    """From a known loss to the next step: 1.0 to 1.14 s measured with a heartbeat of 1 s."""

    torchft_rejoin_s: float = 3.3
    """Of the new replica alone: 3.3 to 8.2 s measured. The others go on meanwhile."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(field.name, value, "must be a finite number, not negative")

    def forming_s(self, num_workers: int) -> float:
        return self.groups_s + self.groups_per_worker_s * num_workers


def with_overrides(constants: Constants, texts: list[str]) -> Constants:
    """`name=value`, as on the command line."""
    names = [field.name for field in fields(Constants)]
    values: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise ConfigError("--set", text, hint)
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError("--set", text, "must be NAME=NUMBER") from None
    return replace(constants, **values)
