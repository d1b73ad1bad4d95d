from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everstep.core.errors import ConfigError, LogCorrupt, LogEntryMissing
from everstep.membership.facts import LogDirection, LogRun
from everstep.recovery.log import BoundaryLog, LogKey
from everstep.recovery.log_disk import LocalLogDisk

SETTLE_S = 30.0
WRITER = "everstep log writer"


def key(step: int, microbatch: int = 0, *, attempt: int = 1) -> LogKey:
    return LogKey(step, attempt, microbatch, 0, LogDirection.FORWARD)


def tensor_of(step: int, microbatch: int = 0) -> torch.Tensor:
    """1000 bytes that tell where they come from."""
    return torch.full((250,), step * 100.0 + microbatch)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def log(tmp_path: Path, warnings: list[str]) -> Iterator[BoundaryLog]:
    """Room for four entries in memory, and for twenty in all."""
    with BoundaryLog(
        tmp_path, memory_bytes=4000, budget_bytes=21_000, on_warning=warnings.append
    ) as opened:
        yield opened


def test_what_fits_into_memory_never_touches_the_disk(log: BoundaryLog, tmp_path: Path) -> None:
    for microbatch in range(4):
        log.record(key(1, microbatch), [tensor_of(1, microbatch)], "x")
    log.wait_settled(timeout_s=SETTLE_S)
    assert list(tmp_path.rglob("*")) == []
    assert log.report().memory_bytes == 4000
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 1, 1, 1, (0, 1, 2, 3)),)


def test_spilled_entries_are_read_back_from_disk(log: BoundaryLog) -> None:
    for step in range(1, 11):
        log.record(key(step), [tensor_of(step)], f"structure {step}")
        log.wait_settled(timeout_s=SETTLE_S)
    assert log.report().memory_bytes == 4000
    assert log.report().disk_bytes > 6000
    for step in range(1, 11):
        [found], structure = log.read(key(step))
        assert torch.equal(found, tensor_of(step))
        assert structure == f"structure {step}"
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 1, 10, 1, (0,)),)


def test_a_record_that_is_written_in_many_pieces_is_read_back_whole(tmp_path: Path) -> None:
    """Pieces end anywhere: within a buffer, at its end, before a short one."""
    path = tmp_path / "segment"
    sizes = (24, (512 << 10) - 24, 7, 1_300_001, 1, 512 << 10)
    buffers = [memoryview(os.urandom(size)) for size in sizes]
    disk = LocalLogDisk()
    disk.write(path, buffers, at=0)
    assert bytes(disk.read(path, at=0, size_bytes=sum(sizes))) == b"".join(buffers)


def test_the_files_of_collected_steps_are_written_over_and_hold_what_is_new(
    log: BoundaryLog, tmp_path: Path
) -> None:
    for interval in range(3):
        for step in range(10 * interval, 10 * interval + 10):
            log.record(key(step), [tensor_of(step)], "x")
            log.wait_settled(timeout_s=SETTLE_S)
        files = {path for path in tmp_path.rglob("*") if path.suffix in (".segment", ".spare")}
        assert len(files) <= 10, "as many as the longest interval needed"
        for step in range(10 * interval, 10 * interval + 10):
            [found], _ = log.read(key(step))
            assert torch.equal(found, tensor_of(step))
        log.collect(10 * interval + 9)
        log.wait_settled(timeout_s=SETTLE_S)


def test_collected_steps_are_gone_from_memory_and_disk(log: BoundaryLog, tmp_path: Path) -> None:
    for step in range(1, 11):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    assert list(tmp_path.rglob("*.segment"))
    log.collect(8)
    log.wait_settled(timeout_s=SETTLE_S)
    assert not list(tmp_path.rglob("*.segment"))
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 9, 10, 1, (0,)),)
    with pytest.raises(LogEntryMissing, match="2 steps between 9 and 10"):
        log.read(key(8))


def test_a_step_run_again_replaces_the_older_attempt(log: BoundaryLog) -> None:
    log.record(key(1, attempt=1), [tensor_of(1)], "first")
    log.record(key(1, attempt=2), [tensor_of(2)], "second")
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 1, 1, 2, (0,)),)
    assert log.read(key(1, attempt=2))[1] == "second"
    with pytest.raises(LogEntryMissing):
        log.read(key(1, attempt=1))
    assert log.report().memory_bytes == 1000


def test_a_late_word_of_an_older_attempt_changes_nothing(log: BoundaryLog) -> None:
    log.record(key(1, attempt=2), [tensor_of(1)], "newer")
    log.record(key(1, attempt=1), [tensor_of(1)], "older")
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 1, 1, 2, (0,)),)


def test_a_replay_keeps_what_is_there_and_adds_what_is_not(log: BoundaryLog) -> None:
    log.record(key(1, 0, attempt=1), [tensor_of(1)], "first")
    log.record(key(1, 0, attempt=2), [tensor_of(1)], "again", replace=False)
    log.record(key(1, 1, attempt=2), [tensor_of(1)], "again", replace=False)
    assert log.runs() == (
        LogRun(0, LogDirection.FORWARD, 1, 1, 1, (0,)),
        LogRun(0, LogDirection.FORWARD, 1, 1, 2, (1,)),
    )


def test_a_collected_step_takes_no_more_entries_until_it_is_run_again(log: BoundaryLog) -> None:
    log.record(key(5, 0), [tensor_of(5)], "x")
    log.collect(5)
    log.record(key(5, 1), [tensor_of(5)], "late")
    assert log.runs() == ()
    log.record(key(5, 1, attempt=2), [tensor_of(5)], "again")
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 5, 5, 2, (1,)),)


def test_no_graph_is_kept_behind_an_activation(log: BoundaryLog) -> None:
    weight = torch.ones(250, requires_grad=True)
    sent = weight * 2
    log.record(key(1), [sent], "x")
    [found], _ = log.read(key(1))
    assert found.grad_fn is None
    assert not found.requires_grad
    assert found.data_ptr() == sent.data_ptr()


def test_a_view_is_charged_for_all_that_it_keeps_in_memory(log: BoundaryLog) -> None:
    whole = torch.zeros(500)
    log.record(key(1), [whole[:10], whole[10:20]], "x")
    assert log.report().memory_bytes == 2000
    assert log.report().recorded_bytes == 80


def test_a_tensor_changed_after_it_was_sent_is_not_offered(
    log: BoundaryLog, warnings: list[str]
) -> None:
    """A stage may send a parameter along; the optimizer's step then changes what the log holds."""
    parameter = torch.nn.Parameter(tensor_of(1))
    log.record(key(1, 0), [parameter], "x")
    log.record(key(1, 1), [tensor_of(1, 1)], "x")
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 1, 1, 1, (0, 1)),)
    with torch.no_grad():
        parameter.add_(1.0)
    assert log.runs() == (LogRun(0, LogDirection.FORWARD, 1, 1, 1, (1,)),)
    for step in range(2, 8):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    assert warnings == [
        f"the log of boundary tensors cannot keep {key(1, 0)}: a tensor was modified in place"
        " after it was sent"
    ]
    with pytest.raises(LogEntryMissing):
        log.read(key(1, 0))


def test_a_tensor_changed_in_memory_is_damage_to_who_reads_it(log: BoundaryLog) -> None:
    sent = tensor_of(1)
    log.record(key(1), [sent], "x")
    sent.zero_()
    with pytest.raises(LogCorrupt, match="modified in place"):
        log.read(key(1))
    assert log.report().memory_bytes == 0


def test_a_tensor_that_cannot_be_kept_is_a_warning_and_no_error(
    log: BoundaryLog, warnings: list[str]
) -> None:
    log.record(key(1), [torch.eye(3).to_sparse()], "x")
    assert log.runs() == ()
    [warning] = warnings
    assert f"cannot keep {key(1)}" in warning


def test_a_listener_that_raises_does_not_reach_training(tmp_path: Path) -> None:
    def complain(_: str) -> None:
        raise RuntimeError("no patience")

    with BoundaryLog(tmp_path, memory_bytes=1, budget_bytes=1, on_warning=complain) as log:
        log.record(key(1), [tensor_of(1)], "x")
        assert log.runs() == ()


def test_a_closed_log_is_empty_and_deaf(log: BoundaryLog, tmp_path: Path) -> None:
    for step in range(1, 11):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    log.close()
    log.record(key(11), [tensor_of(11)], "x")
    log.close()
    assert log.runs() == ()
    assert log.report().memory_bytes == log.report().disk_bytes == 0
    assert list(tmp_path.rglob("*")) == []
    with pytest.raises(LogEntryMissing, match="it is empty"):
        log.read(key(1))


def test_no_writer_is_left_after_close(log: BoundaryLog) -> None:
    assert [thread for thread in threading.enumerate() if thread.name == WRITER]
    log.close()
    assert not [thread for thread in threading.enumerate() if thread.name == WRITER]


def test_threads_that_record_read_and_collect_at_once_find_what_they_should(
    tmp_path: Path,
) -> None:
    errors: list[BaseException] = []
    with BoundaryLog(
        tmp_path, memory_bytes=64_000, budget_bytes=1 << 30, on_warning=pytest.fail
    ) as log:

        def work(boundary: int) -> None:
            try:
                for step in range(1, 61):
                    mine = LogKey(step, 1, 0, boundary, LogDirection.BACKWARD)
                    log.record(mine, [torch.full((125,), float(step * 10 + boundary))], "x")
                    log.wait_settled(timeout_s=SETTLE_S)
                    try:
                        [found], _ = log.read(mine)
                    except LogEntryMissing:
                        assert step <= collected[0]
                    else:
                        assert set(found.tolist()) == {float(step * 10 + boundary)}
                    if boundary == 0 and step % 10 == 0:
                        collected[0] = step - 5
                        log.collect(step - 5)
                    log.runs()
            except BaseException as error:  # noqa: BLE001 raised again by the test
                errors.append(error)

        collected = [0]
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        assert log.report().oldest_step == 56
        assert log.report().dropped_steps == 0


def test_a_directory_that_was_cleaned_away_is_made_again(
    log: BoundaryLog, tmp_path: Path, warnings: list[str]
) -> None:
    for step in range(1, 7):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    with pytest.raises(LogCorrupt):
        log.read(key(1))
    for step in range(7, 11):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    assert torch.equal(log.read(key(6))[0][0], tensor_of(6))
    assert warnings == []


def test_only_the_owner_may_look_at_the_files(log: BoundaryLog, tmp_path: Path) -> None:
    for step in range(1, 7):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    [own] = tmp_path.iterdir()
    assert own.name.startswith(f"log-{os.getpid()}-")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in own.iterdir()} == {0o600}


def test_the_logs_of_dead_processes_are_removed_at_the_start(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(30)
    here = socket.gethostname()
    own_start = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    owners = {
        "log-dead": f'{{"host": "{here}", "pid": {dead.pid}, "started": "1"}}',
        "log-number-used-again": f'{{"host": "{here}", "pid": {os.getpid()}, "started": "1"}}',
        "log-alive": f'{{"host": "{here}", "pid": {os.getpid()}, "started": "{own_start}"}}',
        "log-of-another-host": f'{{"host": "not-{here}", "pid": {dead.pid}, "started": "1"}}',
        "log-unreadable": "what",
        "other": f'{{"host": "{here}", "pid": {dead.pid}, "started": "1"}}',
    }
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.json").write_text(owner)
    BoundaryLog(tmp_path, memory_bytes=1, budget_bytes=1, on_warning=pytest.fail).close()
    assert {path.name for path in tmp_path.iterdir()} == {
        "log-alive",
        "log-of-another-host",
        "log-unreadable",
        "other",
    }


def test_a_log_without_room_is_turned_down(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        BoundaryLog(tmp_path, memory_bytes=0, budget_bytes=1, on_warning=pytest.fail)
