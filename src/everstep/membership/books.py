"""All that the coordinator knows, and what it has said that is not yet out.

Pure. It decides nothing: `Generations`, `Progress` and `Attendance` do, and all write here.
Invariant: once there is an outcome, it does not change, and everybody has been told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.facts import JobFacts
from everstep.membership.ledger import StepLedger
from everstep.membership.planbook import PlanBook
from everstep.membership.planning import Planner
from everstep.membership.regrouping import Halting, Outage
from everstep.membership.roster import Roster, Shape, Worker
from everstep.membership.silence import Patience
from everstep.membership.traffic import Effect, Emit, End, Outcome, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    profile_steps: int = 3
    """Steps that are measured before the plan is made anew from the measurements; 0 for never."""

    patience: Patience = field(default_factory=Patience)

    replace_after_s: float | None = None
    """A lost worker is started again so long after its loss; None for never."""


class Books:
    def __init__(self, shape: Shape, settings: WorldSettings, *, planner: Planner) -> None:
        self.shape = shape
        self.settings = settings
        self.roster = Roster(shape)
        self.ledger = StepLedger(shape.stages)
        self.plans = PlanBook(shape, planner)
        self.job: JobFacts | None = None
        self.generation = 0
        self.members: set[str] = set()
        """The uids of the generation, the lost ones among them."""

        self.halting: Halting | None = None
        self.boundary: int | None = None
        """The step after which the generation ends by plan."""

        self.is_beginning = True
        """The workers have not trained yet, or are started again: no generation has formed."""

        self.num_awaited = shape.num_workers
        """So many must be ready to begin."""

        self.told_step = -1
        """The last that the events tell of. Steps that are run again are not told again."""

        self.durable_step = -1
        """Of the newest checkpoint that is whole on disk; -1: the model as it was built."""

        self.unlogged: tuple[int, ...] = ()
        """Boundaries that need no log: the stages on both sides are replayed together."""

        self.outage: Outage | None = None
        self.num_fruitless = 0
        """Changes of generation since the last step or loss."""

        self.outcome: Outcome | None = None
        self._effects: list[Effect] = []

    def members_here(self) -> dict[WorkerId, Worker]:
        """The live workers of the generation, those that have halted among them."""
        return {p: w for p, w in self.roster.placed().items() if w.uid in self.members}

    def has_all_steps(self) -> bool:
        return self.job is not None and self.ledger.open_step == self.job.steps

    def send(self, uid: str, message: m.ToWorker | m.ToAgent) -> None:
        self._effects.append(Send(uid, message))

    def emit(self, event: str, **fields: object) -> None:
        self._effects.append(Emit(event, fields))

    def fail(self, why: str) -> None:
        if self.outcome is None:
            self.emit("failed", why=why, traceback=None)
            self.end(Outcome(exit_code=1, why=why))

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        stop = m.Stop(outcome.why, outcome.exit_code)
        for worker in self.roster.here():
            self.send(worker.uid, stop)
        for uid, agent in self.roster.agents.items():
            if agent.is_here:
                self.send(uid, stop)
        self._effects.append(End(outcome))

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
