"""Workers killed at every named point of the protocol: training goes on and the numbers stay.

Many kills share a run: each is followed by a replacement, which joins before the next kill is due.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos_job import CLIP_NORM
from chaos_runs import check_unharmed, reference, run_chaos
from everstep.core.points import Point
from everstep.testing.faults import IN_EVERY_STEP, FaultScript, random_kills

IN_STEPS = """
    kill 1:1 before-receive@6;     kill 0:0 after-receive@18#2;  kill 2:1 before-send@30;
    kill 1:0 after-send@42#3;      kill 0:1 before-reduction@54; kill 2:0 in-reduction@66;
    kill 1:1 after-reduction@78;   kill 0:0 before-optimizer@90; kill 2:1 after-optimizer@102
"""

AROUND_STEPS = """
    kill 1:1 before-send@6;  kill 0:0 halted@5;
    kill 2:1 before-send@24; kill 1:0 before-groups@24;
    kill 0:1 before-send@42; kill 2:0 after-groups@42;
    kill 1:1 before-send@60; kill 0:1 before-copy@60;
    kill 2:0 before-send@78; kill 0:0 after-copy@78;
    kill 1:0 before-send@96; kill 1:0 before-copy@96; kill 1:0 after-copy@96;
    kill 2:1 before-evaluate@114; kill 1:1 before-gather@129
"""
"""In pairs: a loss, and another while all halt, connect or copy. 0:S is the source of a copy."""

AT_ONCE = """
    kill 1:0 before-send@6;  kill 1:1 before-send@6;
    kill 0:1 before-receive@24; kill 2:1 after-receive@24;
    kill 0:1 after-send@42
"""
"""A whole replica; two of one stage; the reporter."""

REPLACED = ("--wait-for", "6")


def test_the_scripts_have_every_point() -> None:
    scripts = FaultScript.parse(f"{IN_STEPS}; {AROUND_STEPS}")
    assert {fault.at.point for fault in scripts.faults} == set(Point)
    assert {f.at.point for f in FaultScript.parse(IN_STEPS).faults} == set(IN_EVERY_STEP)


def test_a_kill_at_any_point_of_a_step_leaves_no_trace(tmp_path: Path) -> None:
    run = run_chaos(tmp_path, IN_STEPS, steps=115, replace_after="0.2", job_flags=REPLACED)
    check_unharmed(run, reference(3, 2, 115))


def test_a_kill_at_any_point_of_recovery_joining_and_operations_leaves_no_trace(
    tmp_path: Path,
) -> None:
    run = run_chaos(
        tmp_path,
        AROUND_STEPS,
        steps=130,
        replace_after="0.2",
        job_flags=(*REPLACED, "--evaluate-every", "6"),
    )
    check_unharmed(run, reference(3, 2, 130))


def test_several_workers_lost_at_once_leave_no_trace(tmp_path: Path) -> None:
    run = run_chaos(tmp_path, AT_ONCE, steps=55, replace_after="0.2", job_flags=REPLACED)
    check_unharmed(run, reference(3, 2, 55))


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3, 4))])
def test_random_kills_leave_no_trace(tmp_path: Path, seed: int) -> None:
    script = random_kills(seed, replicas=3, stages=4, steps=60, number=5)
    run = run_chaos(tmp_path, script, replicas=3, stages=4, steps=60)
    check_unharmed(run, reference(3, 4, 60))


@pytest.mark.soak
def test_kills_while_clipping_takes_steps_back_leave_no_trace(tmp_path: Path) -> None:
    flags = (*REPLACED, "--clipped", "--evaluate-every", "6")
    run = run_chaos(tmp_path, AROUND_STEPS, steps=130, replace_after="0.2", job_flags=flags)
    check_unharmed(run, reference(3, 2, 130, CLIP_NORM))
    assert run.live.of("rollback"), run


def test_a_stage_without_workers_ends_the_job_with_one_message(tmp_path: Path) -> None:
    run = run_chaos(tmp_path, "kill 0:1 before-send@5; kill 1:1 before-send@5", replicas=2)
    assert run.live.status == 1, run
    (failed,) = run.live.of("failed")
    assert "stage 1 has no live worker left" in failed["why"], run
    (last,) = [f"last finished step: {run.live.of('step')[-1]['step']}"]
    assert last in failed["why"], run
    assert run.live.output.count("training cannot go on") == 1, run
    assert "Traceback" not in run.live.output, run
    lost_s = run.live.of("worker_lost")[-1]["time"]
    assert failed["time"] - lost_s < 10, "it need not wait for anything"
