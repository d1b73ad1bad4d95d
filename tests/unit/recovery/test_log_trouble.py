"""Disks that are full, slow or broken: the protected range gets smaller, and training goes on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everstep.membership.facts import LogDirection, LogRun
from everstep.recovery.log import BoundaryLog, LogKey
from everstep.recovery.log_disk import LocalLogDisk, LogDirectory

SETTLE_S = 30.0
FORWARD = LogDirection.FORWARD


class FaultyDisk(LocalLogDisk):
    """Full or broken, or waiting for a word, while it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.error: OSError | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_waiting = threading.Event()

    def write(self, path: Path, buffers: Sequence[memoryview], *, at: int) -> None:
        self.is_waiting.set()
        assert self.may_write.wait(60), "the test did not let the disk go on"
        if self.error is not None:
            raise self.error
        # What the kernel itself says of a full disk.
        super().write(Path("/dev/full") if self.is_full else path, buffers, at=at)


@contextmanager
def opened(
    directory: Path, disk: FaultyDisk, warnings: list[str], *, budget: int = 1 << 20
) -> Iterator[BoundaryLog]:
    """With room for two steps in memory."""
    with BoundaryLog(
        directory, memory_bytes=4000, budget_bytes=budget, on_warning=warnings.append, disk=disk
    ) as log:
        try:
            yield log
        finally:
            disk.may_write.set()


def record_step(log: BoundaryLog, step: int, *, attempt: int = 1) -> None:
    """Two micro-batches of 1000 bytes."""
    for microbatch in range(2):
        tensor = torch.full((250,), float(10 * step + microbatch))
        log.record(LogKey(step, attempt, microbatch, 0, FORWARD), [tensor], "x")


def train(log: BoundaryLog, steps: range) -> None:
    for step in steps:
        record_step(log, step)
        log.wait_settled(timeout_s=SETTLE_S)


def held(log: BoundaryLog) -> list[int]:
    """Each step that is held, whole, and reads back right."""
    steps = []
    for run in log.runs():
        assert run.microbatches == (0, 1), run
        steps += list(range(run.first_step, run.last_step + 1))
        for step in range(run.first_step, run.last_step + 1):
            for microbatch in run.microbatches:
                [found], _ = log.read(LogKey(step, run.attempt, microbatch, 0, FORWARD))
                assert set(found.tolist()) == {float(10 * step + microbatch)}
    return steps


def test_a_full_disk_costs_the_oldest_steps_and_one_warning(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.is_full = True
        train(log, range(1, 21))
        assert held(log) == [19, 20]
        assert log.report().dropped_steps == 18
        assert warnings == [
            "the log of boundary tensors dropped its steps up to 1: the disk is full"
            " (No space left on device); steps 2 to 3 are protected now"
        ]


def test_a_disk_that_fills_up_keeps_its_newest_steps(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        train(log, range(1, 21))
        assert held(log) == list(range(1, 21))
        disk.is_full = True
        train(log, range(21, 31))
        assert held(log)[-1] == 30
        assert log.report().oldest_step == held(log)[0] > 1
        assert warnings[0].startswith("the log of boundary tensors dropped its steps up to 1:")


def test_new_steps_are_protected_again_when_the_disk_has_room(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.is_full = True
        train(log, range(1, 11))
        disk.is_full = False
        train(log, range(11, 31))
        assert held(log) == list(range(9, 31))


def test_the_same_trouble_is_told_again_only_after_a_good_interval(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.is_full = True
        train(log, range(1, 11))
        log.collect(10)
        train(log, range(11, 21))
        assert len(warnings) == 1
        disk.is_full = False
        log.collect(20)
        train(log, range(21, 31))
        log.collect(30)
        disk.is_full = True
        train(log, range(31, 41))
        assert len(warnings) == 2


def test_a_disk_that_cannot_be_written_is_named_as_that(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    disk.error = OSError(errno.EROFS, "Read-only file system")
    with opened(tmp_path, disk, warnings) as log:
        train(log, range(1, 6))
        assert held(log) == [4, 5]
        assert "the disk cannot be written (Read-only file system)" in warnings[0]


def test_a_directory_that_cannot_be_made_costs_protection_not_training(tmp_path: Path) -> None:
    warnings = list[str]()
    (tmp_path / "file").write_text("")
    with opened(tmp_path / "file" / "log", FaultyDisk(), warnings) as log:
        train(log, range(1, 6))
        assert held(log) == [4, 5]
        assert "the disk cannot be written (Not a directory)" in warnings[0]


def test_a_slow_disk_never_holds_up_training(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.may_write.clear()
        for step in range(1, 4):
            record_step(log, step)
        assert disk.is_waiting.wait(SETTLE_S)
        for step in range(4, 21):
            record_step(log, step)
        # Twice the bound is eight entries; one, long dropped, hangs in the disk.
        assert held(log) == [18, 19, 20]
        assert log.report().memory_bytes == 7000
        [warning] = warnings
        assert "the disk is too slow (9 KB are in memory, to be spilled above 4 KB)" in warning
        disk.may_write.set()
        log.wait_settled(timeout_s=SETTLE_S)
        train(log, range(21, 31))
        assert held(log) == list(range(18, 31))
        assert len(warnings) == 1


def test_a_step_dropped_while_it_is_recorded_is_never_held_in_part(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    disk.may_write.clear()
    with opened(tmp_path, disk, warnings) as log:
        for microbatch in range(9):
            log.record(LogKey(1, 1, microbatch, 0, FORWARD), [torch.zeros(250)], "x")
        assert log.runs() == ()
        log.record(LogKey(1, 1, 9, 0, FORWARD), [torch.zeros(250)], "x")
        assert log.runs() == ()
        assert warnings[0].endswith("no step is protected until the next checkpoint")


def test_a_dropped_step_is_held_when_it_is_run_again(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.is_full = True
        train(log, range(1, 11))
        disk.is_full = False
        for step in range(5, 11):
            record_step(log, step, attempt=2)
            log.wait_settled(timeout_s=SETTLE_S)
        assert held(log) == list(range(5, 11))
        assert {run.attempt for run in log.runs()} == {2}


def test_files_kept_for_reuse_do_not_stand_in_the_way_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, pwritev = LocalLogDisk(), os.pwritev
    files = [tmp_path / "0.segment", tmp_path / "1.segment"]
    for file in files:
        disk.write(file, [memoryview(b"old")], at=0)
    for file in files:
        disk.remove(file)
    assert len(list(tmp_path.glob("*.spare"))) == 2

    def is_full_while_spares_are_there(fd: int, buffers: list[memoryview], at: int) -> int:
        if list(tmp_path.glob("*.spare")):
            raise OSError(errno.ENOSPC, "no space")
        return pwritev(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", is_full_while_spares_are_there)
    disk.write(tmp_path / "2.segment", [memoryview(b"new")], at=0)
    assert [path.name for path in tmp_path.iterdir()] == ["2.segment"]
    assert bytes(disk.read(tmp_path / "2.segment", at=0, size_bytes=3)) == b"new"


def test_collecting_what_is_just_being_written_leaves_nothing_behind(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.may_write.clear()
        disk.is_waiting.clear()
        for step in range(1, 4):
            record_step(log, step)
        assert disk.is_waiting.wait(SETTLE_S)
        log.collect(1)
        assert held(log) == [2, 3]
        disk.may_write.set()
        log.wait_settled(timeout_s=SETTLE_S)
        assert held(log) == [2, 3]
        assert not list(tmp_path.rglob("*.segment"))
        assert log.report().memory_bytes == 4000
        assert log.report().disk_bytes == 0
    assert warnings == []


def test_a_step_run_again_while_its_older_attempt_is_written_is_the_newer_one(
    tmp_path: Path,
) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.may_write.clear()
        disk.is_waiting.clear()
        for step in range(1, 4):
            record_step(log, step)
        assert disk.is_waiting.wait(SETTLE_S)
        record_step(log, 1, attempt=2)
        disk.may_write.set()
        log.wait_settled(timeout_s=SETTLE_S)
        assert held(log) == [2, 3, 1]
        assert LogRun(0, FORWARD, 1, 1, 2, (0, 1)) in log.runs()


def test_the_byte_budget_bounds_memory_and_disk_together(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings, budget=21_000) as log:
        for step in range(1, 41):
            train(log, range(step, step + 1))
            report = log.report()
            assert report.memory_bytes + report.disk_bytes <= 21_000
        assert held(log) == list(range(held(log)[0], 41))
        assert len(held(log)) >= 7
        assert "its budget of 21 KB is used up; steps 2 to" in warnings[0]
        assert len(warnings) == 1


def test_a_hanging_disk_does_not_keep_a_closed_log_from_leaving_no_file(tmp_path: Path) -> None:
    disk, warnings = FaultyDisk(), list[str]()
    with opened(tmp_path, disk, warnings) as log:
        disk.may_write.clear()
        disk.is_waiting.clear()
        for step in range(1, 4):
            record_step(log, step)
        assert disk.is_waiting.wait(SETTLE_S)
        closing = threading.Thread(target=log.close)
        closing.start()
        while log.runs() != ():
            pass
        disk.may_write.set()
        closing.join(SETTLE_S)
        assert not closing.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_removed_for_good_is_not_made_again(tmp_path: Path) -> None:
    """A writer that hung in its disk beyond the close comes back and wants to write on."""
    directory = LogDirectory(tmp_path)
    directory.ensure()
    directory.remove()
    with pytest.raises(FileNotFoundError, match="the log was closed"):
        directory.ensure()
    assert list(tmp_path.iterdir()) == []
