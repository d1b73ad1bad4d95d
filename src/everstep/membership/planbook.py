"""The plan in force and the measurements it is made from. Pure, but for the planner it is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from everstep.core.ids import WorkerId
from everstep.membership.action_rows import ActionRow, pack_actions
from everstep.membership.facts import JobFacts, StageProfile
from everstep.membership.planning import Plan, Planner, PlanRequest, median_profile
from everstep.membership.roster import Shape


class PlanBook:
    def __init__(self, shape: Shape, planner: Planner) -> None:
        self.plan: Plan | None = None
        self.request: PlanRequest | None = None
        """What it was made for."""

        self.durations: tuple[StageProfile, ...] | None = None
        self._shape = shape
        self._planner = planner

    @property
    def unit(self) -> str:
        """Of the plan's period: slots until durations have been measured."""
        return "slots" if self.durations is None else "seconds"

    def make(self, job: JobFacts, live: Collection[WorkerId]) -> Plan:
        self.request = PlanRequest(
            replicas=self._shape.replicas,
            stages=self._shape.stages,
            microbatches=job.microbatches,
            lost=frozenset(self.lost(live)),
            durations=self.durations,
            in_flight=job.in_flight,
        )
        self.plan = self._planner(self.request)
        return self.plan

    def lost(self, live: Collection[WorkerId]) -> list[WorkerId]:
        return [place for place in self._shape.places() if place not in live]

    def actions_of(self, place: WorkerId) -> tuple[ActionRow, ...]:
        assert self.plan is not None
        return pack_actions(self.plan.actions[place])

    def fields(self, live: Collection[WorkerId]) -> dict[str, object]:
        """For the events of a generation and of a replan."""
        assert self.plan is not None
        return {
            "lost": [str(place) for place in self.lost(live)],
            "period": self.plan.period,
            "bound": self.plan.lower_bound,
            "unit": self.unit,
            "actions": {str(place): _outline(self.plan, place) for place in live},
        }

    def measure(self, profiles: Mapping[WorkerId, StageProfile]) -> None:
        """Takes one profile per live worker; plans made from now on use them."""
        self.durations = tuple(
            median_profile([p for place, p in profiles.items() if place.stage == stage])
            for stage in range(self._shape.stages)
        )


def _outline(plan: Plan, place: WorkerId) -> str:
    """`F0.0 F0.1 B0.0 ...`: kind, replica and micro-batch of each action, in order."""
    return " ".join(f"{a.kind}{a.replica}.{a.microbatch}" for a in plan.actions[place])
