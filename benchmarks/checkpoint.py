"""What a checkpoint costs: stall, time to durable, restore; beside torch.save and DCP.

    python benchmarks/checkpoint.py [--size-gb 1] [--rounds 5] [--device cpu] [--directory DIR]

An emulated training loop: forward and backward compute for several times as long as a copy of the
state takes, then every tensor is updated in place. All systems save the same state in turn, in one
run. The limits are measured in the same run: a plain copy of the state into warm memory, and the
fastest of two plain ways to put as many bytes on this disk. All cores but one compute. Progress is
told on stderr. Exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from checkpoint_systems import Everstep, State, System, stock_systems
from everstep.checkpoint.disk import LocalDisk

MOST_OVERLAPPED_STALL = 0.15
"""Of the copy's own time, when forward and backward last longer than the copy."""
MOST_PLAIN_STALL = 1.1
"""When there is nothing to overlap with."""
LEAST_DISK_SHARE = 0.9
"""Time of a plain write of as many bytes, to the time until the checkpoint is durable."""
LEAST_RESTORE_SPEEDUP = 2.0
"""Over dcp.load, both from the page cache. As the save left them, DCP's files are in the page cache
and ours, written around it, come from the disk: printed beside it."""

COMPUTE_PER_COPY = 5.0
"""Forward and backward last as many times as long as the copy."""
WARM_PER_COLD = 3
"""Restores from the page cache, to one from the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One save. Seconds."""

    overlapped_s: float
    """What the training thread waited: in the call, and before the update."""
    slowdown_s: float
    """By how much the step with the save was longer than one without: the stall, and what the copy
    and the writer take from the processor and the memory meanwhile."""
    plain_s: float
    """What it waited when the update came at once."""
    durable_s: float
    """From the call, with nothing else running."""
    copy_limit_s: float
    disk_limit_s: float
    """Measured at the start of the round, right before ours: the machine's speed changes from
    minute to minute."""


class Loop:
    """A model that is only its cost."""

    def __init__(self, size_bytes: int, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        length = size_bytes // 4 // 48
        self.state: State = {
            f"{kind}/layers.{number}": torch.randn(length, device=device)
            for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
            for number in range(16)
        }
        self._matrix = torch.randn(1024, 1024, device=device) / 32
        self._num_products = 1

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state.values())

    def calibrate(self, compute_s: float) -> None:
        self._num_products = 20
        taken_s = min(self.seconds_of(self.compute) for _ in range(5))
        self._num_products = max(1, round(20 * compute_s / taken_s))

    def compute(self) -> None:
        matrix = self._matrix
        for _ in range(self._num_products):
            matrix = torch.mm(matrix, self._matrix)

    def update(self) -> None:
        torch._foreach_mul_(list(self.state.values()), 0.999)

    def step(self) -> None:
        self.compute()
        self.update()

    def finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def seconds_of(self, work: Callable[[], None]) -> float:
        self.finish()
        started_s = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a round is held against. Seconds."""

    step_s: float
    copy_s: float
    disk_s: float


def measure(system: System, loop: Loop, step: int, limits: Limits) -> Reading:
    system.tidy()
    loop.finish()
    started_s = time.perf_counter()
    system.save(step, loop.state)
    called_s = time.perf_counter()
    loop.compute()
    if isinstance(system, Everstep):
        waiting_s = time.perf_counter()  # On a device, the engine knows what the device waited.
    else:
        loop.finish()  # Stock systems know no streams: whoever updates must know the copy is done.
        waiting_s = time.perf_counter()
    system.before_update()
    ready_s = time.perf_counter()
    loop.update()
    loop.finish()
    slowdown_s = time.perf_counter() - started_s - limits.step_s
    system.durable_at_s()
    waited_s = called_s - started_s + ready_s - waiting_s
    if isinstance(system, Everstep):
        waited_s = float(system.last["stall_seconds"])

    system.tidy()
    started_s = time.perf_counter()
    system.save(step + 1, loop.state)
    system.before_update()
    loop.finish()
    plain_s = time.perf_counter() - started_s
    durable_at_s = system.durable_at_s()
    return Reading(
        overlapped_s=waited_s,
        slowdown_s=slowdown_s,
        plain_s=plain_s,
        durable_s=durable_at_s - started_s,
        copy_limit_s=limits.copy_s,
        disk_limit_s=limits.disk_s,
    )


class CopyLimit:
    """Plain copies of the state into memory that is there already."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        if loop.device == "cpu":
            memory = mmap.mmap(-1, loop.size_bytes)
            self._target = torch.frombuffer(memory, dtype=torch.uint8)
            self._target.zero_()
            self._ways = [_move_each, _copy_each]
        else:
            self._target = torch.empty(loop.size_bytes, dtype=torch.uint8, pin_memory=True)
            self._ways = [_copy_each]

    def seconds(self) -> float:
        """The fastest of six."""
        return min(self._seconds(way) for way in self._ways * (6 // len(self._ways)))

    def _seconds(self, way: Callable[[torch.Tensor, State], None]) -> float:
        return self._loop.seconds_of(lambda: way(self._target, self._loop.state))


def _move_each(target: torch.Tensor, state: State) -> None:
    at = target.data_ptr()
    for tensor in state.values():
        ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
        at += tensor.nbytes


def _copy_each(target: torch.Tensor, state: State) -> None:
    at = 0
    for tensor in state.values():
        size = tensor.nbytes
        target[at : at + size].copy_(tensor.view(torch.uint8), non_blocking=True)
        at += size


def disk_seconds(directory: Path, size_bytes: int) -> float:
    """A plain write of as many bytes, synced: the faster of past and through the page cache."""
    taken = []
    with mmap.mmap(-1, 64 << 20) as memory, memoryview(memory) as pages:
        pages[:] = os.urandom(1 << 20) * 64
        for is_direct in (True, False):
            path = directory / "disk-limit"
            started_s = time.perf_counter()
            file = LocalDisk().create(path, is_direct=is_direct)
            for at in range(0, size_bytes, len(pages)):
                file.write(pages, at=at)
            file.sync()
            file.close()
            taken.append(time.perf_counter() - started_s)
            path.unlink()
    return min(taken)


def forget(files: list[Path]) -> None:
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def remember(files: list[Path]) -> None:
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """Seconds to read the newest save into the tensors it came from."""

    left_s: float
    """With the page cache as the save left it."""
    cold: list[float]
    """One per round."""
    warm: list[float]
    """`WARM_PER_COLD` per round: short, so noisy."""


def restoring(systems: list[System], loop: Loop, *, num_rounds: int) -> dict[str, Restoring]:
    """By system. They take turns, as with saves: a slow minute of the machine meets them all."""
    found = {
        system.name: Restoring(left_s=_restore_s(system, loop), cold=[], warm=[])
        for system in systems
    }
    for number in range(1, num_rounds + 1):
        for system in systems:
            forget(system.files())
            found[system.name].cold.append(_restore_s(system, loop))
            remember(system.files())
        for _ in range(WARM_PER_COLD):
            for system in systems:
                found[system.name].warm.append(_restore_s(system, loop))
                warm_s = found[system.name].warm[-1]
                _progress(f"restore {number} of {num_rounds}, {system.name}: {warm_s:.3f} s")
    return found


def _restore_s(system: System, loop: Loop) -> float:
    return loop.seconds_of(lambda: system.load(loop.state))


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    directory = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=arguments.directory))
    try:
        return _run(arguments, directory)
    finally:
        shutil.rmtree(directory)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", help="Where the big files go, and are removed.")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, directory: Path) -> int:
    loop = Loop(int(arguments.size_gb * 1e9), arguments.device)
    size_bytes = loop.size_bytes
    load = os.getloadavg()[0]
    copy_limit = CopyLimit(loop)
    loop.calibrate(COMPUTE_PER_COPY * copy_limit.seconds())
    systems: list[System] = [
        Everstep(directory / "everstep", loop.state),
        *stock_systems(directory, device=arguments.device),
    ]
    readings = _readings(systems, loop, directory, copy_limit, num_rounds=arguments.rounds)
    restores = restoring(systems, loop, num_rounds=arguments.rounds)
    for system in systems:
        system.close()
    print(
        f"state {size_bytes / 1e9:.2f} GB on {arguments.device}, {torch.get_num_threads()} of"
        f" {os.cpu_count()} cores compute, {arguments.rounds} rounds (medians), load {load:.1f}"
        f" to {os.getloadavg()[0]:.1f}"
    )
    everything = [reading for taken in readings.values() for reading in taken]
    copy_s = median(reading.copy_limit_s for reading in everything)
    disk = [reading.disk_limit_s for reading in everything]
    print(
        f"limits: copy {copy_s:.3f} s ({size_bytes / copy_s / 1e9:.1f} GB/s), disk"
        f" {median(disk):.3f} s ({size_bytes / median(disk) / 1e9:.2f} GB/s, {min(disk):.3f} to"
        f" {max(disk):.3f} s); forward and backward last {COMPUTE_PER_COPY:g} copies"
    )
    _print_table(readings, restores)
    return _judge(readings["everstep"], restores)


def _readings(
    systems: list[System],
    loop: Loop,
    directory: Path,
    copy_limit: CopyLimit,
    *,
    num_rounds: int,
) -> dict[str, list[Reading]]:
    """By system. One that does not work here is taken out of `systems`."""
    readings: dict[str, list[Reading]] = {system.name: [] for system in systems}
    for number in range(num_rounds + 1):
        # Once per round: with a few gigabytes the disk is what a run waits for.
        limits = Limits(
            step_s=median(loop.seconds_of(loop.step) for _ in range(3)),
            copy_s=copy_limit.seconds(),
            disk_s=disk_seconds(directory, loop.size_bytes),
        )
        _progress(f"round {number} of {num_rounds}: {limits}")
        for system in list(systems):
            try:
                reading = measure(system, loop, 2 * number, limits)
            except Exception as error:
                if isinstance(system, Everstep):
                    raise
                # Not all of torch's settings work in all of its versions.
                print(f"left out: {system.name}: {type(error).__name__}: {error}", flush=True)
                systems.remove(system)
                del readings[system.name]
                continue
            _progress(f"round {number} of {num_rounds}, {system.name}: {reading.durable_s:.3f} s")
            if number:  # The first one allocates.
                readings[system.name].append(reading)
    return readings


def _progress(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _print_table(readings: dict[str, list[Reading]], restores: dict[str, Restoring]) -> None:
    print(
        f"{'seconds':32}{'stall':>8}{'slower':>8}{'no overlap':>12}{'durable':>9}"
        f"{'restore':>9}{'cold':>7}{'warm':>7}"
    )
    for name, taken in readings.items():
        restore = restores[name]
        print(
            f"{name:32}{median(r.overlapped_s for r in taken):>8.3f}"
            f"{median(r.slowdown_s for r in taken):>8.3f}"
            f"{median(r.plain_s for r in taken):>12.3f}"
            f"{median(r.durable_s for r in taken):>9.3f}"
            f"{restore.left_s:>9.3f}{median(restore.cold):>7.3f}{median(restore.warm):>7.3f}"
        )


def _judge(taken: list[Reading], restores: dict[str, Restoring]) -> int:
    """Each reading is held against the limits, and the rival, of its own round."""
    ours, theirs = restores["everstep"], restores["dcp.save"]
    overlapped = median(r.overlapped_s / r.copy_limit_s for r in taken)
    plain = median(r.plain_s / r.copy_limit_s for r in taken)
    disk_share = median(r.disk_limit_s / r.durable_s for r in taken)
    speedup = _median_ratio(theirs.warm, ours.warm)
    bars = [
        ("stall / copy, overlapped", overlapped, overlapped <= MOST_OVERLAPPED_STALL, "<= 0.15"),
        ("stall / copy, no overlap", plain, plain <= MOST_PLAIN_STALL, "<= 1.1"),
        ("disk's time / time to durable", disk_share, disk_share >= LEAST_DISK_SHARE, ">= 0.9"),
        ("dcp.load / restore, page cache", speedup, speedup >= LEAST_RESTORE_SPEEDUP, ">= 2"),
    ]
    for what, value, is_met, bar in bars:
        print(f"{what:34}{value:>7.2f}   {bar:8}{'met' if is_met else 'MISSED'}")
    print(f"{'dcp.load / restore, both cold':34}{_median_ratio(theirs.cold, ours.cold):>7.2f}")
    print(f"{'dcp.load / restore, as left':34}{theirs.left_s / ours.left_s:>7.2f}")
    return 0 if all(is_met for _, _, is_met, _ in bars) else 1


def _median_ratio(theirs: list[float], ours: list[float]) -> float:
    return median(their_s / our_s for their_s, our_s in zip(theirs, ours, strict=True))


if __name__ == "__main__":
    sys.exit(main())
