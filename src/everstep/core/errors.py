"""The error tree, sorted by what the caller should do next.

* EverstepError
  - ConfigError      the user must change an input
  - NotPlannable     no plan exists for these losses; re-form the world or stop
  - PlanInvalid      a plan broke a rule of the checker; report a bug
  - CannotUndo       the last step cannot be taken back; recover another way, or keep copies
  - MissingExtra     an optional library is not installed; install it or go without
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


class MissingExtra(EverstepError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, library: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs {library}, which is not installed: pip install 'everstep[{extra}]'"
        )
        self.library = library
