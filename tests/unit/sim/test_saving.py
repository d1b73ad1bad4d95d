"""How often is saved, and live policies behind the same question."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from everstep.core.errors import ConfigError
from everstep.sim.saving import Asked, CheckFreq, EverySteps, SaveCosts, YoungDaly, policy_named

COSTS = SaveCosts(step_s=2.0, stall_s=0.5, durable_s=9.0, load_s=8.0)


def test_young_daly_is_the_root_of_twice_the_stall_over_the_rate() -> None:
    assert YoungDaly().interval_steps(COSTS, failures_per_second=1e-4) == 50
    assert YoungDaly().interval_steps(COSTS, failures_per_second=0.0) == math.inf


def test_nobody_saves_before_the_last_checkpoint_is_durable() -> None:
    assert YoungDaly().interval_steps(COSTS, failures_per_second=10.0) == 5
    assert CheckFreq().interval_steps(COSTS, failures_per_second=0.0) == 8  # 0.5 / (0.035 * 2)


@dataclass(frozen=True)
class AfterSeconds:
    seconds: float

    def is_due(self, situation: float) -> bool:
        return situation >= self.seconds


@pytest.mark.parametrize(("seconds", "steps"), [(100.0, 50), (101.0, 51), (1.0, 5), (1e9, 500e6)])
def test_a_live_policy_is_asked_for_the_first_step_it_is_due(seconds: float, steps: int) -> None:
    asked = Asked(
        policy=AfterSeconds(seconds), situation=lambda costs, _rate, since: since * costs.step_s
    )
    assert asked.interval_steps(COSTS, failures_per_second=0.0) == steps


def test_a_live_policy_that_is_never_due_never_saves() -> None:
    asked = Asked(policy=AfterSeconds(math.inf), situation=lambda _costs, _rate, since: since)
    assert asked.interval_steps(COSTS, failures_per_second=1.0) == math.inf


def test_policies_have_names_or_are_numbers() -> None:
    assert policy_named("checkfreq") == CheckFreq()
    assert policy_named("40") == EverySteps(40)
    with pytest.raises(ConfigError, match="young-daly"):
        policy_named("often")
