"""Training that is killed and started again gives bit for bit what it would have given."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from autosave_job import WAIT_S, Job, Run, running, undisturbed


def killed_and_resumed(job: Job, *, after_step: int, delay_s: float = 0.0) -> tuple[Run, Run]:
    """The run that was killed, and the one that went on to the end."""
    with running(job) as first:
        while first.hear_step() < after_step:
            pass
        time.sleep(delay_s)
        first.kill()
        first.hear_steps_to_the_end()
    with running(job) as second:
        second.steps[-1], events = second.hear_end()
    assert events[0]["event"] == "resumed", "nothing was durable before the kill"
    assert {"event": "failure_seen", "failures": 1}.items() <= events[1].items()
    return first, second


def assert_same(whole: Run, *parts: Run) -> None:
    for part in parts:
        assert part.steps.items() <= whole.steps.items()
    assert parts[-1].steps[-1] == whole.steps[-1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, num_workers: int) -> None:
    job = Job(directory=tmp_path / "whole", num_workers=num_workers, total=36)
    whole = undisturbed(job)
    rng = random.Random(num_workers)
    disturbed = replace(job, directory=tmp_path / "disturbed")
    first, second = killed_and_resumed(
        disturbed, after_step=rng.randrange(14, 30), delay_s=rng.uniform(0, 0.02)
    )
    assert 0 < min(step for step in second.steps if step >= 0) <= max(first.steps) + 1
    assert_same(whole, first, second)


def test_gradients_that_were_accumulated_are_never_lost(tmp_path: Path) -> None:
    job = Job(directory=tmp_path / "whole", accumulate=4, total=40)
    whole = undisturbed(job)
    first, second = killed_and_resumed(
        replace(job, directory=tmp_path / "disturbed"), after_step=26
    )
    assert min(step for step in second.steps if step >= 0) % 4 == 0
    assert_same(whole, first, second)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_once_more_and_then_does_what_it_does(tmp_path: Path, number: int) -> None:
    job = Job(directory=tmp_path / "whole", every=1000)
    whole = undisturbed(job)
    job = replace(job, directory=tmp_path / "disturbed")
    with running(job) as first:
        while first.hear_step() < 8:
            pass
        pid = first.process.pid
        assert pid is not None
        os.kill(pid, number)
        first.hear_steps_to_the_end()
        first.process.join(WAIT_S)
        # SIGINT is Python's KeyboardInterrupt, with which multiprocessing ends in 1.
        assert first.process.exitcode == (-signal.SIGTERM if number == signal.SIGTERM else 1)
    with running(job) as second:
        second.steps[-1], events = second.hear_end()
    assert events[0]["event"] == "resumed"
    assert events[0]["step"] == max(first.steps) + 1, "not one step was lost"
    assert "failure_seen" not in [event["event"] for event in events]
    assert_same(whole, first, second)


def test_ranks_of_ddp_save_the_same_step_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    job = Job(directory=tmp_path / "whole", ranks=2, total=24)
    whole = together(replace(job, meeting=tmp_path / "meet-1"))
    job = replace(job, directory=tmp_path / "disturbed")
    killed = together(replace(job, meeting=tmp_path / "meet-2"), kill_after=13)
    again = together(replace(job, meeting=tmp_path / "meet-3"))
    for rank in range(2):
        assert_same(whole[rank], killed[rank], again[rank])
        assert min(again[rank].steps.keys() - {-1}) > 0
    assert whole[0].steps.items() != whole[1].steps.items(), "each has its own part of the data"


def test_a_signal_to_one_rank_is_a_signal_to_all(tmp_path: Path) -> None:
    job = Job(directory=tmp_path / "whole", ranks=2, every=1000)
    whole = together(replace(job, meeting=tmp_path / "meet-1"))
    job = replace(job, directory=tmp_path / "disturbed")
    with ExitStack() as stack:
        met = replace(job, meeting=tmp_path / "meet-2")
        stopped = [stack.enter_context(running(met, rank)) for rank in range(2)]
        while stopped[1].hear_step() < 8:
            pass
        pid = stopped[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        for run in stopped:
            run.hear_steps_to_the_end()
            run.process.join(WAIT_S)
            assert run.process.exitcode == -signal.SIGTERM
    again = together(replace(job, meeting=tmp_path / "meet-3"))
    for rank in range(2):
        assert min(again[rank].steps.keys() - {-1}) == max(stopped[rank].steps) + 1
        assert_same(whole[rank], stopped[rank], again[rank])


def together(job: Job, *, kill_after: int | None = None) -> list[Run]:
    with ExitStack() as stack:
        runs = [stack.enter_context(running(job, rank)) for rank in range(job.ranks)]
        if kill_after is None:
            for run in runs:
                run.steps[-1], _ = run.hear_end()
        else:
            while runs[0].hear_step() < kill_after:
                pass
            for run in reversed(runs):
                run.kill()
        return runs
