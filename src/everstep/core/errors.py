"""The error tree, sorted by what the caller should do next.

* EverstepError
  the user must change something
  - ConfigError           an input breaks a rule
  - TraceInvalid          a row of a failure trace is not one
  - UserCodeError         the user's model, loss or dataset raised; its own error is the cause
  - DataStalled           the dataset gave nothing for too long
  - NormNotFinite         gradients overflowed: another model, learning rate or precision
  - MissingExtra          an optional library is not installed
  - CheckpointMismatch    a checkpoint is of another model, optimizer or set of things
  - StateNotSavable       a state holds something that no checkpoint can hold
  - NotInCheckpoint       a tensor was asked for that this checkpoint does not hold
  - NotImportable         a file of another tool cannot be read, or must not be
  - CheckpointNotWritten  a checkpoint that somebody waits for could not be written
  recover another way, or keep copies
  - CannotUndo            the last optimizer step cannot be taken back
  - LogEntryMissing       the log of boundary tensors does not hold what was asked for
  - LogCorrupt            an entry of that log is not what was recorded
  use an older checkpoint
  - CheckpointCorrupt     a saved state fails its checksums
  go on in the next generation
  - GenerationEnded       the membership changed under us
  - PeerLost              a peer is gone
  - PeerSilent            a peer did not answer in time; it may be lost
  - PeerRefused           a peer will not talk to us; our membership is wrong
  - StoreUnreachable      the store beside the coordinator is gone
  - WaitTimedOut          what was awaited did not come; treat the other side as lost
  re-form the world or stop
  - NotPlannable          no plan exists for these losses
  end this process
  - CoordinatorGone       no word can come any more
    - CoordinatorStopped    the job is over, and this is why
    - CoordinatorLost       the connection broke, or could not be made
    - CoordinatorRefused    it answered and said no: another token, another version
  - WarmParentLost        no worker can be started any more
  close that connection
  - MessageInvalid        bytes from outside are not a message
  report a bug
  - PlanInvalid           a plan broke a rule of the checker
  - ProtocolBroken        a peer did or sent what the protocol forbids
  - IllegalTransition     something happened to a worker that cannot in its state
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


class TraceInvalid(EverstepError):
    """A row of a failure trace is not of its format. Carries the file's name and the line."""

    def __init__(self, name: str, line: int, why: str) -> None:
        super().__init__(f"{name}, line {line}: {why}")
        self.name = name
        self.line = line
        self.why = why


class UserCodeError(EverstepError):
    """Code that the user gave raised. The original error, with its traceback, is the cause."""

    def __init__(self, where: str, *, error: BaseException) -> None:
        super().__init__(f"{where} raised {type(error).__name__}: {error}")
        self.where = where


class DataStalled(EverstepError):
    """A micro-batch was waited for and did not come."""

    def __init__(self, what: str, *, waited_s: float) -> None:
        super().__init__(
            f"the dataset has not given the samples of {what} for {waited_s:.0f} s:"
            " is dataset[i] stuck, or in need of a longer timeout?"
        )
        self.what = what
        self.waited_s = waited_s


class NormNotFinite(EverstepError):
    """Gradients overflowed: the step cannot be scaled, and was applied already."""

    def __init__(self, step: int, norm: float) -> None:
        super().__init__(
            f"the gradient norm of step {step} is {norm}: lower the learning rate,"
            " or look for the layer that overflows"
        )
        self.step = step
        self.norm = norm


class MissingExtra(EverstepError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, library: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs {library}, which is not installed: pip install 'everstep[{extra}]'"
        )
        self.library = library


class CheckpointMismatch(EverstepError):
    """A good checkpoint does not fit what it should be loaded into. Nothing was changed."""

    def __init__(self, checkpoint: str, *, problems: Sequence[str]) -> None:
        shown = "; ".join(problems[:5])
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        super().__init__(
            f"{checkpoint} is of something else: {shown}{more}."
            " Give what was saved there, or another directory to begin anew"
        )
        self.checkpoint = checkpoint
        self.problems = tuple(problems)


class StateNotSavable(EverstepError):
    """A tree of state holds something that is neither a tensor nor plain data."""

    def __init__(self, path: str, *, kind: str) -> None:
        super().__init__(
            f"the state at '{path}' is {kind}: keep it out of the state,"
            " or turn it into tensors, numbers, strings, lists, tuples and dicts"
        )
        self.path = path
        self.kind = kind


class NotInCheckpoint(EverstepError):
    """A checkpoint does not hold what was asked of it."""

    def __init__(self, name: str, *, checkpoint: str, why: str) -> None:
        super().__init__(f"{checkpoint} does not hold '{name}': {why}")
        self.name = name
        self.checkpoint = checkpoint


class NotImportable(EverstepError):
    """A file of another tool cannot be read without running code from it, or not at all."""

    def __init__(self, path: str, *, why: str) -> None:
        super().__init__(f"cannot import {path}: {why}")
        self.path = path
        self.why = why


class CheckpointNotWritten(EverstepError):
    """A save that was asked for by hand failed. In training, that is an event instead."""

    def __init__(self, directory: str, *, step: int, why: str) -> None:
        super().__init__(f"no checkpoint of step {step} in {directory}: {why}")
        self.directory = directory
        self.step = step
        self.why = why


class CannotUndo(EverstepError):
    """The last optimizer step cannot be taken back.

    Raised before anything was changed, unless the gradients were not finite: then the step had
    already destroyed the parameters.
    """

    def __init__(self, optimizer: str, *, reason: str, what_to_do: str) -> None:
        super().__init__(f"cannot undo a step of {optimizer}: {reason}; {what_to_do}")
        self.optimizer = optimizer
        self.reason = reason
        self.what_to_do = what_to_do


class LogEntryMissing(EverstepError):
    """The log never had this entry, or has forgotten it."""

    def __init__(self, entry: str, *, why: str) -> None:
        super().__init__(f"the log does not hold {entry}: {why}; recover another way")
        self.entry = entry
        self.why = why


class LogCorrupt(EverstepError):
    """An entry of the log is not what was recorded. The log has forgotten it."""

    def __init__(self, entry: str, *, why: str) -> None:
        super().__init__(f"the log of {entry} is damaged: {why}; recover another way")
        self.entry = entry
        self.why = why


class CheckpointCorrupt(EverstepError):
    """A checkpoint is not what was written. Nothing of it may be used."""

    def __init__(self, checkpoint: str, *, why: str) -> None:
        super().__init__(f"{checkpoint} is damaged: {why}; use an older checkpoint")
        self.checkpoint = checkpoint
        self.why = why


class GenerationEnded(EverstepError):
    """The generation is over for this worker. Normal life: what was interrupted is run again."""

    def __init__(self, generation: int, *, why: str = "go on in the next one") -> None:
        super().__init__(f"generation {generation} has ended: {why}")
        self.generation = generation
        self.why = why


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


class WaitTimedOut(EverstepError):
    """Something awaited did not come."""

    def __init__(self, what: str, *, source: str, after_s: float) -> None:
        super().__init__(f"no {what} from {source} within {after_s:.1f} s")
        self.what = what
        self.source = source
        self.after_s = after_s


class NotPlannable(EverstepError):
    """A stage has no live worker left, so its micro-batches have nowhere to go."""

    def __init__(self, stage: int, *, num_lost: int) -> None:
        super().__init__(
            f"stage {stage} has no live worker: all {num_lost} are lost"
            " (every stage needs at least one)"
        )
        self.stage = stage
        self.num_lost = num_lost


class CoordinatorGone(EverstepError):
    """There is no coordinator to talk to any more."""


class CoordinatorStopped(CoordinatorGone):
    """The coordinator ended the job."""

    def __init__(self, why: str, *, exit_code: int) -> None:
        super().__init__(f"the coordinator ended the job: {why}")
        self.why = why
        self.exit_code = exit_code


class CoordinatorLost(CoordinatorGone):
    """The connection to the coordinator broke or could not be made."""

    def __init__(self, address: str, *, why: str) -> None:
        super().__init__(f"no connection to the coordinator at {address}: {why}")
        self.address = address
        self.why = why


class CoordinatorRefused(CoordinatorGone):
    """The coordinator turned the connection down; trying again will not help."""

    def __init__(self, address: str, *, status: int, why: str) -> None:
        super().__init__(f"the coordinator at {address} refused the connection ({status}): {why}")
        self.address = address
        self.status = status
        self.why = why


class WarmParentLost(EverstepError):
    """The process that workers are forked from is gone or never came up."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the warm parent is gone: {why}")
        self.why = why


class MessageInvalid(EverstepError):
    """A frame is not one of the messages that may come on its connection."""

    def __init__(self, why: str, *, size_bytes: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes is not a message: {why}")
        self.why = why
        self.size_bytes = size_bytes


class PlanInvalid(EverstepError):
    """A plan that must not run. `problems` lists every broken rule that was found."""

    def __init__(self, problems: Sequence[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"plan breaks a rule: {problems[0]}{more}")
        self.problems = tuple(problems)


class ProtocolBroken(EverstepError):
    """Bytes, or an order of messages, that no correct peer sends."""

    def __init__(self, what: str, *, peer: str = "a peer") -> None:
        super().__init__(f"{peer} broke the protocol: {what}")
        self.peer = peer
        self.what = what


class IllegalTransition(EverstepError):
    """Something happened to a worker that its state does not allow."""

    def __init__(self, state: str, happening: str, *, legal: Sequence[str]) -> None:
        allowed = ", ".join(legal) or "nothing"
        super().__init__(f"'{happening}' cannot happen to a {state} worker (only: {allowed})")
        self.state = state
        self.happening = happening
