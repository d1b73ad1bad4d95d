"""Replay: which stages are rebuilt together, how long it takes, and when logs do not help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.checkpoint.baselines import EverySteps
from everstep.core.errors import ConfigError
from everstep.sim.account import Account, Cause
from everstep.sim.constants import Constants
from everstep.sim.job import Job, Layer
from everstep.sim.logs import Groups, replay_step_s
from everstep.sim.loop import run
from everstep.sim.setting import Failures, Setting
from everstep.sim.systems.registry import SYSTEMS
from everstep.sim.trace import make_trace

HOUR = 3600.0
LAYER = Layer(
    forward=1.0,
    input_gradient=1.0,
    weight_gradient=1.0,
    state_bytes=1e9,
    gradient_bytes=0.0,
    activation_bytes=1e6,
)
JOB = Job(
    name="small",
    replicas=3,
    stages=4,
    microbatches=6,
    layers=(LAYER,) * 4,
    boundary_bytes=0.0,
    optimizer_s=0.0,
)


def account_of(*lost: int, log_groups: int, earlier: tuple[int, ...] = ()) -> Account:
    """`lost` at five hours, `earlier` at one; a checkpoint every 10 steps."""
    rows = [(5 * HOUR, worker, True) for worker in lost]
    rows += [(HOUR, worker, True) for worker in earlier]
    trace = make_trace(rows, name="t", num_nodes=12, duration_s=10 * HOUR)
    setting = Setting(
        job=JOB,
        failures=Failures.of(trace),
        constants=Constants(logging_fraction=0.0),
        policy=EverySteps(10),
        log_groups=log_groups,
    )
    return run(SYSTEMS["everstep"](setting), trace, setting)


def test_a_loss_replays_its_group() -> None:
    six = replace(JOB, stages=6, layers=(LAYER,) * 6)
    groups = Groups.of(six, 3)
    assert groups.ends == (2, 4, 6)
    assert groups.replayed([2], has_hole=lambda _: False) == [2, 3]
    assert groups.replayed([0, 5], has_hole=lambda _: False) == [0, 1, 4, 5]


def test_a_hole_in_a_neighbours_log_draws_its_group_in() -> None:
    six = replace(JOB, stages=6, layers=(LAYER,) * 6)
    groups = Groups.of(six, 3)
    assert groups.replayed([2], has_hole={4}.__contains__) == [2, 3, 4, 5]
    assert groups.replayed([2], has_hole={5, 0}.__contains__) == [
        2,
        3,
    ]
    assert groups.replayed([5], has_hole={3, 1}.__contains__) == [0, 1, 2, 3, 4, 5]


def test_all_who_wait_help_unless_memory_is_short() -> None:
    """18 micro-batches of 3 s. Nine helpers take 2 each; with 0.8 of the speed that is 7.5 s."""
    assert replay_step_s(JOB, [1], num_live=9, num_seated=1, efficiency=0.8) == 7.5
    tight = replace(JOB, device_bytes=1.5e9)
    assert replay_step_s(tight, [1], num_live=9, num_seated=1, efficiency=0.8) == 54.0


def test_logs_that_arrive_slower_than_they_are_used_set_the_pace() -> None:
    wide = replace(JOB, boundary_bytes=250e9)
    assert replay_step_s(wide, [1], num_live=9, num_seated=1, efficiency=0.8) == 2 * 20.0


def test_with_logs_a_stage_without_workers_costs_no_step() -> None:
    account = account_of(1, 5, 9, log_groups=4)
    assert account.rungs["replay"] == 1
    assert account.rungs["checkpoint"] == 0
    assert account.steps_lost == account.num_roll_backs == 0
    without = account_of(1, 5, 9, log_groups=0)
    assert without.rungs["checkpoint"] == 1
    assert without.steps_lost > 0
    # 9 live workers take 7.5 s for a step that took 19 s, so as many steps are replayed sooner.
    assert account.down_s[Cause.REPLAY] == pytest.approx(without.steps_lost * 7.5)


def test_a_log_that_died_since_the_checkpoint_makes_more_to_replay() -> None:
    assert account_of(1, 5, 9, 2, log_groups=4).rungs["replay"] == 1
    # One lost of every other stage at the same time: all that could be read has holes.
    assert account_of(1, 5, 9, 0, 2, 3, log_groups=4).rungs["checkpoint"] == 1
    # Long before, and there has been a checkpoint since.
    assert account_of(1, 5, 9, log_groups=4, earlier=(0, 2)).rungs["replay"] == 1


def test_one_group_is_no_log() -> None:
    assert account_of(1, 5, 9, log_groups=1).rungs["checkpoint"] == 1


def test_more_groups_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="number of stages, which is 4"):
        account_of(1, log_groups=5)
