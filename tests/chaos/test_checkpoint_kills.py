"""SIGKILLs while checkpoints are saved: what was durable stays, what is found is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.checkpoint.restore import newest, wait_writers
from everstep.testing.crashes import (
    WAIT_S,
    Outcome,
    crash,
    hear,
    kills,
    look_with_everstep,
    started,
    train_with_everstep,
    wait_gone,
)
from saving_victim import save_and_die
from states import what_is_in

NUM_KILLS = 20


@pytest.mark.timeout(120)
def test_no_kill_loses_a_durable_checkpoint_or_leaves_a_mixed_one(tmp_path: Path) -> None:
    step, num_in_a_save = -1, 0
    for kill in kills(NUM_KILLS, seed=5, within_s=0.15):
        crashed = crash(
            tmp_path,
            kill,
            train=train_with_everstep,
            look=look_with_everstep,
            first_step=step + 1,
            num_elements=400_000,
        )
        assert crashed.outcome is Outcome.INTACT, f"{crashed} after {kill}"
        assert crashed.newest_step > step
        step = crashed.newest_step
        num_in_a_save += crashed.was_saving
    assert num_in_a_save > 0, "no kill fell into a save: the test shows nothing"


@pytest.mark.timeout(60)
def test_a_state_that_was_copied_becomes_durable_although_the_trainer_is_killed(
    tmp_path: Path,
) -> None:
    with started(save_and_die, tmp_path) as (process, pipe):
        writer_pid = hear(pipe)
        process.join(WAIT_S)
        assert process.exitcode == -signal.SIGKILL
    assert newest(tmp_path) is None
    os.kill(writer_pid, signal.SIGCONT)
    wait_gone(writer_pid)
    assert wait_writers(tmp_path, timeout_s=WAIT_S)
    found = newest(tmp_path)
    assert found is not None
    assert what_is_in(found) == (1, 0)
