"""What the coordinator asks of a planner. The schedule room answers; wiring connects the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from everstep.core.ids import WorkerId
from everstep.membership.facts import StageProfile
from everstep.schedule.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    replicas: int
    stages: int
    microbatches: int
    lost: frozenset[WorkerId] = frozenset()
    durations: tuple[StageProfile, ...] | None = None
    """Per stage; None before anything was measured."""

    in_flight: tuple[int, ...] | None = None


class Plan(Protocol):
    @property
    def period(self) -> float: ...

    @property
    def lower_bound(self) -> float: ...

    @property
    def actions(self) -> Mapping[WorkerId, Sequence[Action]]:
        """Of every live worker, in the order it runs them."""


class Planner(Protocol):
    def __call__(self, request: PlanRequest) -> Plan: ...


def median_profile(profiles: Sequence[StageProfile]) -> StageProfile:
    """Of the workers of one stage: the median shrugs off one that was disturbed. What they send
    adds up."""
    return StageProfile(
        forward=median(profile.forward for profile in profiles),
        input_gradient=median(profile.input_gradient for profile in profiles),
        weight_gradient=median(profile.weight_gradient for profile in profiles),
        transfer=median(profile.transfer for profile in profiles),
        reduction=median(profile.reduction for profile in profiles),
        optimizer=median(profile.optimizer for profile in profiles),
        sent_forward=sum(profile.sent_forward for profile in profiles),
        sent_backward=sum(profile.sent_backward for profile in profiles),
    )
