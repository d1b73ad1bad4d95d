"""The error tree, sorted by what the caller should do next.

* EverstepError
  - ConfigError         the user must change an input
  - MissingExtra        an optional library is not installed; install it or go without
  - GenerationEnded     the membership changed under us; stop, and go on in the next generation
  - PeerLost            a peer is gone; tell the coordinator, the generation must change
  - PeerSilent          a peer did not answer in time; tell the coordinator, it may be lost
  - PeerRefused         a peer will not talk to us; tell the coordinator, our membership is wrong
  - StoreUnreachable    the store beside the coordinator is gone; wait for the coordinator
  - NotPlannable        no plan exists for these losses; re-form the world or stop
  - PlanInvalid         a plan broke a rule of the checker; report a bug
  - ProtocolViolation   a peer sent what the protocol forbids; report a bug
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.core.ids import WorkerId


class EverstepError(Exception):
    """Everything everstep raises on purpose."""


class ConfigError(EverstepError):
    """An input breaks a rule. Carries the field's path, the value and the rule."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} is {value}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class GenerationEnded(EverstepError):
    """The generation is over for this worker. Normal life: what was interrupted is run again."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"generation {generation} has ended: go on in the next one")
        self.generation = generation


class PeerLost(EverstepError):
    """A connection to a peer broke."""

    def __init__(
        self, suspects: Sequence[WorkerId], *, during: str, cause: str, has_left: bool = False
    ) -> None:
        names = " or ".join(str(worker) for worker in suspects)
        super().__init__(f"lost worker {names} during {during}: {cause}")
        self.suspects = tuple(suspects)
        """One worker where the transport can tell who it was; else those it can be."""
        self.has_left = has_left
        """It said goodbye: it is alive, and left the generation because of somebody else."""


class PeerSilent(EverstepError):
    """A wait ran out of time. The peers may be slow, frozen or gone."""

    def __init__(self, peers: Sequence[WorkerId], *, awaited: str, waited_s: float) -> None:
        names = ", ".join(str(worker) for worker in peers)
        super().__init__(f"waited {waited_s:.1f} s for {awaited}: no word from worker {names}")
        self.peers = tuple(peers)
        self.waited_s = waited_s


class PeerRefused(EverstepError):
    """A peer closed the door on our connection, and said why."""

    def __init__(self, worker: WorkerId, *, generation: int, reason: str) -> None:
        super().__init__(
            f"worker {worker} refused our connection for generation {generation}: {reason}"
        )
        self.worker = worker
        self.generation = generation
        self.reason = reason


class StoreUnreachable(EverstepError):
    """The store where groups meet does not answer."""

    def __init__(self, address: str, *, cause: str) -> None:
        super().__init__(f"the store at {address} does not answer: {cause}")
        self.address = address


class NotPlannable(EverstepError):
    """A stage has no live worker left, so its micro-batches have nowhere to go."""

    def __init__(self, stage: int, *, num_lost: int) -> None:
        super().__init__(
            f"stage {stage} has no live worker: all {num_lost} are lost"
            " (every stage needs at least one)"
        )
        self.stage = stage
        self.num_lost = num_lost


class PlanInvalid(EverstepError):
    """A plan that must not run. `problems` lists every broken rule that was found."""

    def __init__(self, problems: Sequence[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"plan breaks a rule: {problems[0]}{more}")
        self.problems = tuple(problems)


class ProtocolViolation(EverstepError):
    """Bytes or an order of messages that no correct peer sends."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the protocol was broken: {what}")
        self.what = what


class MissingExtra(EverstepError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, library: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs {library}, which is not installed: pip install 'everstep[{extra}]'"
        )
        self.library = library
