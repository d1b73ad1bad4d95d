"""Survivors of one stage that were interrupted at different places are brought together exactly."""

from __future__ import annotations

from pathlib import Path

from chaos_job import CLIP_NORM
from chaos_runs import check_unharmed, reference, run_chaos

LATE = "slow 0:0 in-reduction@9 for 1.5"
"""Worker 0:0 has given its share of a sum that its peers have long had when all halt."""

FORWARD = f"{LATE}; slow 2:1 after-optimizer@9 for 0.7; kill 2:1 after-optimizer@9"
BACK = f"{LATE}; slow 2:1 before-reduction@9 for 0.7; kill 2:1 before-reduction@9"


def test_who_took_a_step_back_has_the_bits_of_a_peer_that_never_took_it(tmp_path: Path) -> None:
    run = run_chaos(tmp_path, BACK)
    check_unharmed(run, reference(3, 2, 20))
    (recovery,) = [event for event in run.live.of("generation") if event["number"] == 2]
    assert recovery["rungs"]["0"] == "step back", run


def test_who_is_behind_gets_the_step_from_a_peer_and_can_still_clip_it(tmp_path: Path) -> None:
    run = run_chaos(tmp_path, FORWARD, job_flags=["--clipped"])
    check_unharmed(run, reference(3, 2, 20, CLIP_NORM))
    assert any(event["step"] == 9 for event in run.live.of("rollback")), run
    rungs = [event["rungs"]["0"] for event in run.live.of("generation")]
    assert "roll forward" in rungs, run
