"""What a log costs the one who records, and how fast it spills.

Shows: the time of one record() of a 4 MB tensor while nothing spills, while the writer spills, and
       when steps are dropped because the disk is too slow; the rate of the spill and of reading.
Run:   python benchmarks/boundary_log.py [DIRECTORY]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from everstep.membership.facts import LogDirection
from everstep.recovery.log import BoundaryLog, LogKey
from everstep.recovery.log_disk import LocalLogDisk, LogDisk

TENSOR_BYTES = 4 << 20
NUM_MICROBATCHES = 8
NUM_STEPS = 32
BOUND_BYTES = 128 << 20
SETTLE_S = 120.0


class HangingDisk(LocalLogDisk):
    def __init__(self) -> None:
        self.may_write = threading.Event()

    def write(self, path: Path, buffers: Sequence[memoryview], *, at: int) -> None:
        self.may_write.wait(SETTLE_S)
        super().write(path, buffers, at=at)


@contextmanager
def opened(
    directory: Path, *, memory_bytes: int, disk: LogDisk | None = None
) -> Iterator[tuple[BoundaryLog, list[str]]]:
    warnings: list[str] = []
    with BoundaryLog(
        directory,
        memory_bytes=memory_bytes,
        budget_bytes=64 << 30,
        on_warning=warnings.append,
        disk=disk,
    ) as log:
        yield log, warnings


def keys() -> Iterator[LogKey]:
    for step in range(1, NUM_STEPS + 1):
        for microbatch in range(NUM_MICROBATCHES):
            yield LogKey(step, 1, microbatch, 0, LogDirection.FORWARD)


def record_all(log: BoundaryLog, *, settles: bool) -> list[float]:
    """The seconds of each call. `settles`: as training that leaves the disk time to keep up."""
    seconds = []
    for key in keys():
        tensor = torch.ones(TENSOR_BYTES // 4)
        began_s = time.perf_counter()
        log.record(key, [tensor], "x")
        seconds.append(time.perf_counter() - began_s)
        if settles and key.microbatch % 4 == 3:
            log.wait_settled(timeout_s=SETTLE_S)
    return seconds


def show(what: str, seconds: Sequence[float]) -> None:
    micros = sorted(1e6 * each for each in seconds)
    late = micros[int(0.99 * len(micros))]
    print(
        f"record(), {what:34} median {statistics.median(micros):6.1f} us,"
        f" 99 of 100 {late:7.1f} us, worst {micros[-1]:8.1f} us"
    )


def main(directory: Path) -> None:
    total_bytes = NUM_STEPS * NUM_MICROBATCHES * TENSOR_BYTES
    with opened(directory, memory_bytes=2 * total_bytes) as (log, _):
        show("all in memory", record_all(log, settles=False))
    with opened(directory, memory_bytes=BOUND_BYTES) as (log, warnings):
        show("while the writer spills", record_all(log, settles=True))
        print(f"  {log.report().disk_bytes / 1e6:.0f} MB on disk, warnings: {warnings or 'none'}")
        began_s = time.perf_counter()
        for key in keys():
            log.read(key)
        rate = total_bytes / (time.perf_counter() - began_s)
        print(f"reading it all back, checksums verified: {rate / 1e9:.2f} GB/s")
    disk = HangingDisk()
    with opened(directory, memory_bytes=BOUND_BYTES, disk=disk) as (log, warnings):
        show("while the disk hangs", record_all(log, settles=False))
        print(f"  {log.report().dropped_steps} of {NUM_STEPS} steps dropped; {warnings}")
        disk.may_write.set()
    disk = HangingDisk()
    with opened(directory, memory_bytes=total_bytes // 2, disk=disk) as (log, _):
        record_all(log, settles=False)
        began_s = time.perf_counter()
        disk.may_write.set()
        log.wait_settled(timeout_s=SETTLE_S)
        rate = log.report().disk_bytes / (time.perf_counter() - began_s)
        print(f"spill, checksums taken, not synced: {rate / 1e9:.2f} GB/s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
