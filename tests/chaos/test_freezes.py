"""A frozen worker is lost after a while; when it wakes up it is fenced and disturbs nobody."""

from __future__ import annotations

from pathlib import Path

from chaos_runs import check_unharmed, reference, run_chaos


def test_a_frozen_worker_is_replaced_and_fenced_when_it_wakes(tmp_path: Path) -> None:
    run = run_chaos(
        tmp_path,
        "freeze 1:1 before-send@6 for 8",
        replicas=2,
        steps=60,
        replace_after="0.5",
        # Without all its workers the job is slow enough to be there when the frozen one wakes.
        job_flags=("--wait-for", "4", "--pause", "0.1"),
    )
    check_unharmed(run, reference(2, 2, 60))
    (lost,) = run.live.of("worker_lost")
    assert lost["how"].startswith("silent for"), run
    (returned,) = [e for e in run.live.of("worker_joined") if e["time"] > lost["time"]]
    assert (returned["replica"], returned["stage"]) == (1, 1), run
    assert returned["pid"] != lost["pid"], run
    # One change of generation when it goes, one when its replacement comes.
    assert [event["number"] for event in run.live.of("generation")] == [1, 2, 3], run
    assert lost["pid"] not in [note["pid"] for note in run.notes], run
