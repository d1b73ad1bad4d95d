"""Copies off a device. Only where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep.membership.facts import LogDirection
from everstep.recovery.log import BoundaryLog, LogKey

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def key(step: int) -> LogKey:
    return LogKey(step, 1, 0, 0, LogDirection.FORWARD)


def test_a_copy_holds_what_the_stream_made_before_it_and_nothing_later(tmp_path: Path) -> None:
    """The device is busy when the entry is recorded, and the tensor's memory is used again at once:
    neither may show in what the log holds."""
    device = torch.device("cuda")
    busy = torch.randn(4096, 4096, device=device)
    with BoundaryLog(
        tmp_path, memory_bytes=8 << 20, budget_bytes=1 << 30, on_warning=pytest.fail
    ) as log:
        for step in range(1, 13):
            for _ in range(10):
                busy = torch.nn.functional.normalize(busy @ busy)
            # Depends on all that is queued, and on the step.
            sent = torch.full((1 << 18,), float(step), device=device) + 0 * busy[0, 0]
            log.record(key(step), [sent, sent[::2], sent.to(torch.bfloat16)[1:]], "x")
            del sent
            torch.full((1 << 18,), -1.0, device=device)
            if step % 3 == 0:
                log.wait_settled(timeout_s=60)
        log.wait_settled(timeout_s=60)
        assert log.report().disk_bytes > 0
        for step in range(1, 13):
            tensors, _ = log.read(key(step))
            assert [tensor.device.type for tensor in tensors] == ["cpu"] * 3
            assert [tuple(tensor.shape) for tensor in tensors] == [
                (1 << 18,),
                (1 << 17,),
                ((1 << 18) - 1,),
            ]
            assert all(set(tensor.float().tolist()) == {float(step)} for tensor in tensors)


def test_a_recorded_entry_does_not_wait_for_the_device(tmp_path: Path) -> None:
    device = torch.device("cuda")
    busy = torch.randn(8192, 8192, device=device)
    sent = torch.ones(1 << 20, device=device)
    with BoundaryLog(
        tmp_path, memory_bytes=1 << 30, budget_bytes=1 << 30, on_warning=pytest.fail
    ) as log:
        # The first one makes the page-locked memory and the side stream.
        log.record(key(1), [sent], "x")
        log.collect(1)
        torch.cuda.synchronize()
        for _ in range(200):
            busy = torch.nn.functional.normalize(busy @ busy)
        queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
        queued.record()
        log.record(key(2), [sent], "x")
        is_done = queued.query()  # type: ignore[no-untyped-call]
        assert not is_done, "the device was done before record() returned"
        assert log.read(key(2))[0][0].sum().item() == 1 << 20
