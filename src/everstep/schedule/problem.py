"""What is asked of the planner: a shape, its losses, what things cost and what memory holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from everstep.core.errors import ConfigError, NotPlannable
from everstep.core.ids import WorkerId
from everstep.schedule.durations import Durations


class Variant(StrEnum):
    """How a step may be arranged; each adds one of ReCycle's techniques to the one before.

    glued       B and W are one piece, and the input gradient leaves when both are done
    decoupled   the input gradient leaves after B; W waits for an idle moment
    sync        all stages end the step together, so the period is the makespan
    staggered   a stage goes on with the next step as soon as its own work is done
    """

    ONE_F_ONE_B = "one-f-one-b"
    GLUED_SYNC = "glued-sync"
    GLUED_STAGGERED = "glued-staggered"
    DECOUPLED_SYNC = "decoupled-sync"
    DECOUPLED_STAGGERED = "decoupled-staggered"

    @property
    def is_glued(self) -> bool:
        return self in (Variant.ONE_F_ONE_B, Variant.GLUED_SYNC, Variant.GLUED_STAGGERED)

    @property
    def is_staggered(self) -> bool:
        return self in (Variant.GLUED_STAGGERED, Variant.DECOUPLED_STAGGERED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One planning question. Equal problems have equal plans, so it is also the cache key."""

    replicas: int
    stages: int
    microbatches: int
    """Per replica."""

    lost: frozenset[WorkerId] = frozenset()
    durations: Durations
    in_flight: tuple[int | None, ...] | None = None
    """Per stage, how many micro-batches a worker may hold between F and W; None is no limit."""

    variant: Variant = Variant.DECOUPLED_STAGGERED

    def __post_init__(self) -> None:
        for field in ("replicas", "stages", "microbatches"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
        self._check_lost()
        self._check_per_stage()
        if self.variant is Variant.ONE_F_ONE_B:
            self._check_one_f_one_b()

    def _check_lost(self) -> None:
        for worker in sorted(self.lost):
            if worker.replica >= self.replicas or worker.stage >= self.stages:
                raise ConfigError(
                    "lost",
                    worker,
                    f"there is no such worker in {self.replicas} replicas x {self.stages} stages"
                    " (both count from 0)",
                )
        for stage, num_lost in sorted(Counter(worker.stage for worker in self.lost).items()):
            if num_lost == self.replicas:
                raise NotPlannable(stage, num_lost=num_lost)

    def _check_per_stage(self) -> None:
        if len(self.durations.stages) != self.stages:
            raise ConfigError(
                "durations.stages",
                f"{len(self.durations.stages)} entries",
                f"there are {self.stages} stages, and each needs one",
            )
        if self.in_flight is None:
            return
        if len(self.in_flight) != self.stages:
            raise ConfigError(
                "in_flight",
                ",".join(map(str, self.in_flight)),
                f"must be one number for all, or one for each of the {self.stages} stages",
            )
        for limit in self.in_flight:
            if limit is not None and limit < 1:
                raise ConfigError("in_flight", limit, "must be at least 1")

    def _check_one_f_one_b(self) -> None:
        if self.lost:
            raise ConfigError(
                "variant",
                self.variant,
                "1F1B knows no lost workers; glued-sync is the same idea with re-routing",
            )
        for stage in range(self.stages):
            needed = min(self.stages - stage, self.microbatches)
            limit = self.limit(stage)
            if limit is not None and limit < needed:
                raise ConfigError(
                    f"in_flight[{stage}]", limit, f"1F1B holds {needed} micro-batches there"
                )

    def limit(self, stage: int) -> int | None:
        return None if self.in_flight is None else self.in_flight[stage]

    def live(self, stage: int) -> list[int]:
        """The replicas whose worker of `stage` is alive."""
        return [r for r in range(self.replicas) if WorkerId(r, stage) not in self.lost]

    @property
    def num_workers(self) -> int:
        return self.replicas * self.stages

    @property
    def num_jobs(self) -> int:
        """Micro-batches of all replicas."""
        return self.replicas * self.microbatches

    def fault_free(self, variant: Variant) -> Problem:
        """One replica of the same job without losses; all of them are alike, so it stands for all.

        1F1B has its own memory needs, which the limits do not change.
        """
        limits = None if variant is Variant.ONE_F_ONE_B else self.in_flight
        return replace(self, replicas=1, lost=frozenset(), in_flight=limits, variant=variant)
