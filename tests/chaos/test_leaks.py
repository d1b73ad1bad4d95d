"""Changes of generation leave nothing open."""

from __future__ import annotations

from pathlib import Path

from chaos_runs import check_unharmed, reference, run_chaos

NUM_CHANGES = 30
SPARE = 8
"""Descriptors or threads that come and go; as many for each group that gloo has missed the end of,
which it keeps for a while, see `comm/gloo.py`."""

MOST_STUCK = 3


def test_many_generations_leave_no_descriptor_and_no_thread_open(tmp_path: Path) -> None:
    points = ["before-send", "before-receive", "in-reduction"]
    faults = [f"break {n % 2}:{n // 2 % 2} {points[n % 3]}@{4 + 2 * n}" for n in range(NUM_CHANGES)]
    steps = 10 + 2 * NUM_CHANGES
    run = run_chaos(tmp_path, "; ".join(faults), replicas=2, steps=steps)
    check_unharmed(run, reference(2, 2, steps))
    assert run.live.of("generation")[-1]["number"] == 1 + NUM_CHANGES, run
    for note in run.notes:
        first, last = note["resources"]["first"], note["resources"]["last"]
        num_stuck = last[-1]
        assert num_stuck <= MOST_STUCK
        spare = SPARE * (1 + num_stuck)
        assert all(now <= before + spare for before, now in zip(first, last, strict=True)), (
            f"{first} became {last}"
        )
