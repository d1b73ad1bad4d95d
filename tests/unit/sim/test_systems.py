"""What each system does about a loss, on one small job whose numbers can be checked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from everstep.checkpoint.baselines import EverySteps
from everstep.sim.account import Account, Cause
from everstep.sim.constants import Constants
from everstep.sim.job import Job, Layer
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
FREE = Constants(notice_loss_s=0.0, groups_s=0.0, groups_per_worker_s=0.0)


def account_of(
    name: str, *rows: tuple[float, int, bool], job: Job = JOB, constants: Constants = FREE
) -> Account:
    trace = make_trace(list(rows), name="t", num_nodes=12, duration_s=10 * HOUR)
    setting = Setting(
        job=job, failures=Failures.of(trace), constants=constants, policy=EverySteps(10)
    )
    return run(SYSTEMS[name](setting), trace, setting)


def test_everstep_runs_at_the_planned_period_and_loses_no_step() -> None:
    account = account_of("everstep", (5 * HOUR, 5, True))
    assert account.step_s == 27  # one lost of stage 1: the table of schedules
    assert account.steps_lost == 0
    assert account.rungs == {"continue": 1}


def test_a_loss_between_the_stages_updates_is_undone() -> None:
    """Staggered stages update apart: 19 slots a step, the last stages a little later."""
    rungs = {
        rung
        for moment in range(19)
        for rung in account_of("everstep", (19 * 400.0 + moment, 5, True)).rungs
    }
    assert rungs == {"continue", "undo"}


def test_everstep_restores_a_stage_without_workers_from_a_checkpoint() -> None:
    rows = [(5 * HOUR, worker, True) for worker in (1, 5, 9)]
    account = account_of("everstep", *rows)
    assert account.rungs["checkpoint"] == 1
    assert account.steps_lost > 0
    assert math.isfinite(account.step_s)


def test_everstep_waits_below_one_worker_per_stage() -> None:
    rows = [(5 * HOUR, worker, True) for worker in range(9)]
    account = account_of("everstep", *rows, (6 * HOUR, 0, False))
    assert account.down_s[Cause.WAITING] == pytest.approx(HOUR, rel=0.01)
    assert account.step_s > 27


def test_a_worker_that_comes_back_copies_its_state() -> None:
    account = account_of("everstep", (5 * HOUR, 5, True), (6 * HOUR, 5, False))
    assert account.step_s == 19
    assert account.rungs["replica"] == 1
    assert account.down_s[Cause.COPY] == pytest.approx(1e9 / 25e9)


def test_a_node_that_waits_takes_the_place_of_a_lost_one() -> None:
    trace = make_trace([(5 * HOUR, 5, True)], name="t", num_nodes=13, duration_s=10 * HOUR)
    setting = Setting(job=JOB, failures=Failures.of(trace), num_nodes=13, constants=FREE)
    account = run(SYSTEMS["everstep"](setting), trace, setting)
    assert account.step_s == 19
    assert account.rungs["replica"] == 1


def test_losses_that_lie_badly_are_evened_out() -> None:
    """Two of three workers of stage 0 gone: 54 slots; a worker of another stage makes it 27."""
    account = account_of("everstep", (HOUR, 0, True), (2 * HOUR, 4, True))
    assert account.rungs["move"] == 1
    assert account.step_s == 27
    assert account_of("re-routing", (HOUR, 0, True), (2 * HOUR, 4, True)).step_s >= 54


def test_torchft_loses_the_whole_replica_until_its_worker_is_back() -> None:
    account = account_of("torchft", (5 * HOUR, 5, True))
    assert account.step_s == pytest.approx(27 * 3 / 2)
    assert account_of("torchft", (5 * HOUR, 5, True), (6 * HOUR, 5, False)).step_s == 27


def test_an_elastic_restart_goes_back_to_the_checkpoint_with_whole_replicas() -> None:
    account = account_of("restart-checkfreq", (5 * HOUR, 5, True))
    assert account.step_s == (9 + 3) * 3  # 18 micro-batches on 2 replicas
    assert account.steps_lost >= 0
    assert account.down_s[Cause.RESTART] == 47
    assert account.rungs == {"checkpoint": 1}


def test_spares_step_in_without_a_change_of_pace() -> None:
    account = account_of("spares", (5 * HOUR, 5, True))
    assert account.step_s == (9 + 3) * 3
    assert account.rungs == {"checkpoint": 1}


def test_the_loss_of_a_spare_costs_nothing() -> None:
    assert sum(account_of("spares", (5 * HOUR, 11, True)).rungs.values()) == 0


def test_bamboo_goes_on_with_a_doubled_stage_unless_regrouping_is_faster() -> None:
    account = account_of("bamboo", (5 * HOUR, 5, True))
    regrouped_s = 1.285 * (9 + 3) * 3
    assert account.step_s == pytest.approx(regrouped_s)
    assert account.rungs == {"taken over": 1, "regrouped": 1}
    assert account.steps_lost == 0


def test_bamboo_restarts_when_two_neighbours_are_lost() -> None:
    # Consecutive workers sit in different pipelines: 0 and 3 are stages 0 and 1 of the first.
    account = account_of("bamboo", (5 * HOUR, 0, True), (5 * HOUR, 3, True))
    assert account.rungs["checkpoint"] == 1
    assert account.down_s[Cause.RESTART] == 75


def test_oobleck_shortens_the_pipeline_and_moves_micro_batches() -> None:
    finer = replace(JOB, layers=(replace(LAYER, forward=0.5, input_gradient=0.5),) * 8)
    account = account_of("oobleck", (5 * HOUR, 5, True), job=finer)
    assert account.rungs == {"new templates": 1}
    assert account.steps_lost == 0
    fault_free_s = account_of("oobleck", job=finer).step_s
    assert fault_free_s < account.step_s < 1.5 * fault_free_s


def test_a_system_whose_state_does_not_fit_says_so() -> None:
    tight = replace(JOB, device_bytes=1.5e9)
    trace = make_trace([], name="t", num_nodes=12, duration_s=HOUR)
    setting = Setting(job=tight, failures=Failures.of(trace))
    assert SYSTEMS["everstep"](setting).does_not_fit is None
    why = SYSTEMS["bamboo"](setting).does_not_fit
    assert why is not None
    assert "stage 0 needs 2.0 GB of state" in why


def test_announced_losses_are_noticed_at_once_and_saved_before() -> None:
    rows = [(5 * HOUR, 5, True)]
    trace = make_trace(rows, name="t", num_nodes=12, duration_s=10 * HOUR, notice_s=120)
    setting = Setting(job=JOB, failures=Failures.of(trace), policy=EverySteps(1000))
    account = run(SYSTEMS["restart-young-daly"](setting), trace, setting)
    assert account.steps_lost == 0
    assert account.down_s[Cause.NOTICING] == 0
