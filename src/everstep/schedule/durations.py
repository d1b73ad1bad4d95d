"""How long things take: per-stage F, B and W, transfers, gradient reduction and optimizer.

Any unit will do as long as it is one: slots for a thought experiment, seconds for a measured job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDurations:
    """What one micro-batch costs on one stage."""

    forward: float = 1.0
    input_gradient: float = 1.0
    """Zero is right for a measured stage 0: nobody needs the gradient of its input."""

    weight_gradient: float = 1.0

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """What a step costs, stage by stage."""

    stages: tuple[StageDurations, ...]
    transfer: float = 0.0
    """Between two workers of neighbouring stages. Keeps neither of them busy."""

    reduction: float = 0.0
    """Of a stage's gradients over its live workers, after its last W."""

    optimizer: float = 0.0

    def __post_init__(self) -> None:
        for path, value in self._fields():
            if not math.isfinite(value) or value < 0:
                raise ConfigError(path, value, "must be a finite number, not negative")
        for number, stage in enumerate(self.stages):
            if stage.total <= 0:
                raise ConfigError(
                    f"durations.stages[{number}]", "all zero", "a stage must take some time"
                )

    def _fields(self) -> list[tuple[str, float]]:
        fields = [
            ("durations.transfer", self.transfer),
            ("durations.reduction", self.reduction),
            ("durations.optimizer", self.optimizer),
        ]
        for number, stage in enumerate(self.stages):
            path = f"durations.stages[{number}]"
            fields += [
                (f"{path}.forward", stage.forward),
                (f"{path}.input_gradient", stage.input_gradient),
                (f"{path}.weight_gradient", stage.weight_gradient),
            ]
        return fields

    @property
    def longest(self) -> float:
        return max(self.synchronization, *(value for _, value in self._fields()))

    @property
    def synchronization(self) -> float:
        """What a stage does between its last W and its next F."""
        return self.reduction + self.optimizer

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
    ) -> Durations:
        """The same for every stage, stage 0 too; transfers and synchronization are free."""
        stage = StageDurations(
            forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
        )
        return cls(stages=(stage,) * num_stages)
