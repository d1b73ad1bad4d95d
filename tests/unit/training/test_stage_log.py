"""What a stage logs, under which key, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everstep.core.errors import LogEntryMissing
from everstep.execute.data import Microbatch
from everstep.membership.facts import LogDirection, LogRun
from everstep.recovery.log import BoundaryLog, LogKey
from everstep.schedule.actions import Kind
from everstep.training.stage_log import StageLog

FORWARD, BACKWARD = LogDirection.FORWARD, LogDirection.BACKWARD


@pytest.fixture
def log(tmp_path: Path) -> Iterator[StageLog]:
    kept = BoundaryLog(tmp_path, memory_bytes=1 << 20, budget_bytes=1 << 20, on_warning=pytest.fail)
    stage_log = StageLog(kept, microbatches=3)
    stage_log.begin(attempt=1, unlogged=())
    yield stage_log
    stage_log.close()


def send(
    log: StageLog, step: int, value: float = 0.0, *, replica: int = 0, number: int = 0
) -> None:
    """Stage 1, to the next one."""
    log.sent(Microbatch(step, replica, number), Kind.FORWARD, 1, [torch.tensor([value])], "")


def key(step: int, *, attempt: int = 1, microbatch: int = 0) -> LogKey:
    return LogKey(step, attempt, microbatch, 1, FORWARD)


def test_what_goes_up_and_down_is_kept_by_boundary_and_number_in_the_whole_step(
    log: StageLog,
) -> None:
    send(log, 4, replica=1, number=2)
    log.sent(Microbatch(4, 1, 2), Kind.INPUT_GRADIENT, 1, [torch.zeros(1)], "")
    assert log.runs() == (LogRun(0, BACKWARD, 4, 4, 1, (5,)), LogRun(1, FORWARD, 4, 4, 1, (5,)))


def test_nothing_is_forgotten_before_it_is_told_that_a_checkpoint_is_durable(
    log: StageLog,
) -> None:
    for step in range(6):
        send(log, step)
        log.scales[step] = 0.5
        log.tend(durable_step=-1, unlogged=())
    assert [(run.first_step, run.last_step) for run in log.runs()] == [(0, 5)]
    log.tend(durable_step=3, unlogged=())
    assert [(run.first_step, run.last_step) for run in log.runs()] == [(4, 5)]
    assert sorted(log.scales) == [4, 5]


def test_a_step_that_is_run_again_is_held_once_under_its_new_attempt(log: StageLog) -> None:
    send(log, 4, value=1.0)
    send(log, 5, value=1.0)
    log.begin(attempt=2, unlogged=())
    send(log, 5, value=2.0)
    runs = [(run.first_step, run.last_step, run.attempt) for run in log.runs()]
    assert runs == [(4, 4, 1), (5, 5, 2)]
    assert log.read(key(5, attempt=2))[0][0].item() == 2.0
    with pytest.raises(LogEntryMissing):
        log.read(key(5, attempt=1))


def test_a_replay_does_not_overwrite_what_is_still_there(log: StageLog) -> None:
    """A helper may have sent the same message itself; its neighbours count on the attempt."""
    send(log, 4, value=1.0)
    again = log.sent_again(attempt=3)
    for number in range(2):
        again(Microbatch(4, 0, number), Kind.FORWARD, 1, [torch.tensor([7.0])], "")
    assert log.read(key(4))[0][0].item() == 1.0
    assert log.read(key(4, attempt=3, microbatch=1))[0][0].item() == 7.0


def test_a_boundary_that_needs_no_log_is_counted_and_not_kept(log: StageLog) -> None:
    log.begin(attempt=1, unlogged=(1,))
    send(log, 4)
    log.tend(durable_step=-1, unlogged=(1,))
    assert log.runs() == ()
    assert log.step_bytes[FORWARD] == 4


def test_logging_goes_on_in_the_generation_after_a_replay(log: StageLog) -> None:
    log.sent_again(attempt=2)(Microbatch(4, 0, 0), Kind.FORWARD, 1, [torch.zeros(1)], "")
    log.begin(attempt=3, unlogged=())
    send(log, 5)
    runs = [(run.first_step, run.last_step, run.attempt) for run in log.runs()]
    assert runs == [(4, 4, 2), (5, 5, 3)]
