"""What one worker is told for one generation, and what it tells when it has halted."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.comm.lifetime import Lifetime
from everstep.core.ids import WorkerId
from everstep.membership.facts import LogRun, Meeting, Replay, RollBack, StepResult
from everstep.membership.recovering import StateCopy
from everstep.schedule.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What to do in one generation."""

    generation: int
    step: int
    """The next to run."""

    actions: tuple[Action, ...]
    addresses: dict[WorkerId, str]
    """The data addresses of all live workers."""

    lifetime: Lifetime
    meeting: Meeting | None = None
    profile_steps: int = 0
    redo: RollBack | None = None
    undo: bool = False
    copies: tuple[StateCopy, ...] = ()
    is_copied_step_open: bool = False
    """Those who copy are one step behind: they need its gradients only."""

    operations: int = 0
    """Completed by everybody; later ones are to be served again."""

    result: StepResult | None = None
    """Of the step before `step`, for those who get it by copy."""

    restore: int | None = None
    """The step whose checkpoint is to be loaded first."""

    replays: tuple[Replay, ...] = ()
    """Stages that are rebuilt before the first step."""

    unlogged: tuple[int, ...] = ()
    """Boundaries that need no log."""

    save_name: str = "alone"
    """Joins the parts of a checkpoint: the same on all workers of a generation, and of no other, of
    this job or another."""

    @property
    def members(self) -> tuple[WorkerId, ...]:
        return tuple(sorted(self.addresses))

    def members_of(self, stage: int) -> tuple[WorkerId, ...]:
        return tuple(worker for worker in self.members if worker.stage == stage)

    def lead(self, stage: int) -> WorkerId:
        """The one that speaks for the stage: saves it, and gives its weights."""
        return self.members_of(stage)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where a worker stands when it has halted."""

    finished_step: int | None
    """None: it has no state yet."""

    operations: int
    """Evaluations and gatherings that it has completed."""

    is_operating: bool
    """It was interrupted in one."""

    logged: tuple[LogRun, ...]
