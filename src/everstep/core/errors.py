"""The error tree, sorted by what the caller should do next.

* EverstepError
  - ConfigError      the user must change an input
  - UserCodeError    the user's model, loss or dataset raised; its own error is the cause
  - DataStalled      the dataset gave nothing for too long; make it faster or allow more time
  - NotPlannable     no plan exists for these losses; re-form the world or stop
  - PlanInvalid      a plan broke a rule of the checker; report a bug
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
