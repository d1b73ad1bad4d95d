from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from everstep.core.errors import LogEntryMissing
from everstep.recovery.coverage import Direction, LogRun
from everstep.recovery.log import BoundaryLog, LogKey

SETTLE_S = 30.0


def key(step: int, microbatch: int = 0, *, attempt: int = 1) -> LogKey:
    return LogKey(step, attempt, microbatch, 0, Direction.FORWARD)


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
    assert log.runs() == (LogRun(0, Direction.FORWARD, 1, 1, 1, (0, 1, 2, 3)),)


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
    assert log.runs() == (LogRun(0, Direction.FORWARD, 1, 10, 1, (0,)),)


def test_collected_steps_are_gone_from_memory_and_disk(log: BoundaryLog, tmp_path: Path) -> None:
    for step in range(1, 11):
        log.record(key(step), [tensor_of(step)], "x")
        log.wait_settled(timeout_s=SETTLE_S)
    assert list(tmp_path.rglob("*.segment"))
    log.collect(8)
    log.wait_settled(timeout_s=SETTLE_S)
    assert not list(tmp_path.rglob("*.segment"))
    assert log.runs() == (LogRun(0, Direction.FORWARD, 9, 10, 1, (0,)),)
    with pytest.raises(LogEntryMissing, match="2 steps between 9 and 10"):
        log.read(key(8))
