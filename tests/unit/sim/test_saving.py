"""How often is saved, when live policies are asked in virtual time."""

from __future__ import annotations

import math

import pytest

from everstep.checkpoint.baselines import CheckFreq, EverySteps, YoungDaly
from everstep.checkpoint.objectives import LostProgress
from everstep.checkpoint.policy import Costs, Policy
from everstep.core.errors import ConfigError
from everstep.sim.account import Account
from everstep.sim.saving import first_due, policy_named, seen_rate, start_saving

COSTS = Costs(step_s=2.0, stall_s=0.5, durable_s=9.0)


def interval(policy: Policy, *, failure_rate: float) -> float:
    account = Account(samples_per_step=1)
    start_saving(account, policy, COSTS, failure_rate=failure_rate, num_workers=1)
    return account.interval_steps


def test_young_daly_is_the_root_of_twice_the_stall_over_the_rate() -> None:
    assert interval(YoungDaly(), failure_rate=1e-4) == 50
    assert interval(YoungDaly(), failure_rate=0.0) == math.inf


def test_nobody_saves_before_the_last_checkpoint_is_durable() -> None:
    assert interval(YoungDaly(), failure_rate=10.0) == 5
    assert interval(EverySteps(1), failure_rate=0.0) == 5


def test_checkfreq_does_not_ask_for_the_rate() -> None:
    assert interval(CheckFreq(), failure_rate=0.0) == interval(CheckFreq(), failure_rate=1.0) == 9


def test_the_live_default_is_young_daly_as_long_as_its_budget_allows() -> None:
    assert interval(LostProgress(), failure_rate=1e-4) == 50
    # 3.5 % of the time for stalls of half a second: not before 14.3 s.
    assert interval(LostProgress(), failure_rate=1.0) == 7
    assert interval(YoungDaly(), failure_rate=1.0) == 5


@pytest.mark.parametrize("due", [1, 2, 49, 50, 51, 1000, 10**9])
@pytest.mark.parametrize("guess", [1, 50, 10**6, math.inf])
def test_the_first_step_that_is_due_is_found_from_any_guess(due: int, guess: float) -> None:
    assert first_due(lambda steps: steps >= due, guess=guess) == due


def test_a_policy_that_is_never_due_never_saves() -> None:
    assert first_due(lambda _: False, guess=7) == math.inf


def test_roll_backs_that_were_seen_outweigh_the_prior() -> None:
    account = Account(samples_per_step=1, now_s=10 * 86400.0)
    calm = seen_rate(account, num_devices=8, prior_device_hours=5e4)
    account.num_roll_backs = 100
    rough = seen_rate(account, num_devices=8, prior_device_hours=5e4)
    assert calm < 8 / (5e4 * 3600)
    assert rough == pytest.approx(100 / account.now_s, rel=0.05)


def test_policies_have_names_or_are_numbers() -> None:
    assert policy_named("checkfreq") == CheckFreq()
    assert policy_named("40") == EverySteps(40)
    with pytest.raises(ConfigError, match="young-daly"):
        policy_named("often")
