"""The error tree, sorted by what the caller should do next.

* EverstepError
  - ConfigError      the user must change an input
  - UserCodeError    the user's model, loss or dataset raised; its own error is the cause
  - DataStalled      the dataset gave nothing for too long; make it faster or allow more time
  - NotPlannable     no plan exists for these losses; re-form the world or stop
  - PlanInvalid      a plan broke a rule of the checker; report a bug
  - MissingExtra     an optional library is not installed; install it or go without
  - GenerationEnded  the world changed under us; retry in the next generation
  - CoordinatorGone  no word can come any more; end this process
    - CoordinatorStopped      the job is over, and this is why
    - CoordinatorLost         the connection broke, or could not be made
    - CoordinatorRefused      it answered and said no: another token, another version
  - WaitTimedOut     what was awaited did not come in time; treat the other side as lost
  - MessageInvalid   bytes from outside are not a message; close that connection
  - ProtocolBroken   a peer did what the protocol forbids; report a bug
  - IllegalTransition  something happened to a worker that cannot in its state; report a bug
  - NormNotFinite    gradients overflowed; the user must change the model or the learning rate
  - WarmParentLost   no worker can be started any more; end the agent
"""

from __future__ import annotations

from collections.abc import Sequence


class EverstepError(Exception):
    """Everything everstep raises on purpose."""


class ConfigError(EverstepError):
    """An input breaks a rule. Carries the field's path, the value and the rule."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} is {value}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


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


class MissingExtra(EverstepError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, library: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs {library}, which is not installed: pip install 'everstep[{extra}]'"
        )
        self.library = library


class GenerationEnded(EverstepError):
    """The coordinator ended this generation; its groups and channels are of no more use."""

    def __init__(self, generation: int, *, why: str) -> None:
        super().__init__(f"generation {generation} ended: {why}")
        self.generation = generation
        self.why = why


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


class WaitTimedOut(EverstepError):
    """Something awaited did not come."""

    def __init__(self, what: str, *, source: str, after_s: float) -> None:
        super().__init__(f"no {what} from {source} within {after_s:.1f} s")
        self.what = what
        self.source = source
        self.after_s = after_s


class MessageInvalid(EverstepError):
    """A frame is not one of the messages that may come on its connection."""

    def __init__(self, why: str, *, size_bytes: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes is not a message: {why}")
        self.why = why
        self.size_bytes = size_bytes


class ProtocolBroken(EverstepError):
    """A peer said something it cannot say in its state."""

    def __init__(self, peer: str, *, why: str) -> None:
        super().__init__(f"{peer} broke the protocol: {why}")
        self.peer = peer
        self.why = why


class WarmParentLost(EverstepError):
    """The process that workers are forked from is gone or never came up."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the warm parent is gone: {why}")
        self.why = why


class NormNotFinite(EverstepError):
    """Gradients overflowed: the step cannot be scaled, and was applied already."""

    def __init__(self, step: int, norm: float) -> None:
        super().__init__(
            f"the gradient norm of step {step} is {norm}: lower the learning rate,"
            " or look for the layer that overflows"
        )
        self.step = step
        self.norm = norm


class IllegalTransition(EverstepError):
    """Something happened to a worker that its state does not allow."""

    def __init__(self, state: str, happening: str, *, legal: Sequence[str]) -> None:
        allowed = ", ".join(legal) or "nothing"
        super().__init__(f"'{happening}' cannot happen to a {state} worker (only: {allowed})")
        self.state = state
        self.happening = happening
