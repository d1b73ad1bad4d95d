"""Shows: how long training stands still when a worker is killed, and how fast it is afterwards.
Run:   python benchmarks/recovery.py            (about ten minutes; --kills N, --skip-others)

1. 12 workers, emulated devices, steps of about 0.2 s: kill -9 of a random worker at a random moment
   until the first step finished after it, 20 times, with replacements joining in between; beside it
   the same for a restart of all workers by torchrun with a checkpoint at each step, and for
   torchft, when it is installed (pip install -c constraints.txt -e .[bench]): two replicas, one is
   killed, the other goes on without it.
2. 3 x 4 x 6 on emulated devices: the step with 0, 1, 2 and 3 workers lost, against the plan and
   against the fault-free step of torch's Schedule1F1B on the same devices. Both sides take turns,
   and the medians of three rounds are judged.
Exits with status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launched import SETTLE_STEPS, run_other
from torchft_side import is_installed, measure_torchft

HERE = Path(__file__).parent
REPLICAS, STAGES, MICROBATCHES = 3, 4, 6

MEDIAN_BAR_S, WORST_BAR_S, FASTER_BAR = 0.5, 1.5, 8.0
PARTS = ("halting", "deciding", "groups", "state", "redo")
PLAN_BAR, ONE_LOSS_BAR = 1.05, 1.05
LOSS_ROUNDS = 3


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Events:
    """The events file of a live run, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen_bytes = 0
        self.all: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        """Reads only what is new: it is asked often, beside workers that need the processors."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._seen_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._seen_bytes += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.all += new
        return new

    def wait(self, wanted: Callable[[dict[str, Any]], bool], *, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for event in self.poll():
                if wanted(event):
                    return event
            time.sleep(0.005)
        raise SystemExit(f"nothing came in {timeout_s} s; last event: {self.all[-1:]}")

    def lost(self) -> list[str]:
        """The places that are empty in the newest generation."""
        return next(e["lost"] for e in reversed(self.all) if e["event"] == "generation")

    def pids(self) -> dict[tuple[int, int], int]:
        """Of the live workers, by place."""
        live: dict[tuple[int, int], int] = {}
        for event in self.all:
            if event["event"] == "worker_joined":
                live[event["replica"], event["stage"]] = event["pid"]
            elif event["event"] == "worker_lost":
                live.pop((event["replica"], event["stage"]), None)
        return live


@contextmanager
def emulated_run(steps: int, slot_s: float, *flags: str) -> Iterator[Events]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        shape = ["--replicas", str(REPLICAS), "--stages", str(STAGES)]
        sizes = map(str, (REPLICAS, STAGES, MICROBATCHES, steps, slot_s, slot_s, slot_s))
        program = "from everstep.cli.main import main; main()"
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", program, "run", *shape, "--events", str(path), *flags),
                *(str(HERE / "emulated_job.py"), *sizes),
            ],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Events(path)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    seconds: float
    """From the kill to the first step finished after it."""

    parts: dict[str, float]


def measure_outages(num_kills: int, *, seed: int) -> tuple[list[Outage], float]:
    """The outages, and the usual step."""
    rng = random.Random(seed)
    outages: list[Outage] = []
    with emulated_run(100_000, 0.01, "--replace-after", "0.3") as events:
        events.wait(lambda e: e["event"] == "replanned", timeout_s=60)
        events.wait(lambda e: e["event"] == "step", timeout_s=60)
        while len(outages) < num_kills:
            time.sleep(rng.uniform(0.6, 1.2))
            events.poll()
            place, pid = rng.choice(sorted(events.pids().items()))
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            lost = events.wait(lambda e: e["event"] == "worker_lost", timeout_s=30)
            back = events.wait(lambda e: e["event"] == "recovered", timeout_s=30)
            parts = {
                name: back[name] for name in ("halting", "deciding", "groups", "state", "redo")
            }
            outages.append(
                Outage(
                    seconds=back["time"] - killed_at,
                    parts={"noticing": lost["time"] - killed_at, **parts},
                )
            )
            say(f"kill {len(outages)} of {place}: {outages[-1].seconds:.3f} s")
            if events.lost():  # else the replacement joined before the first step was done
                events.wait(lambda e: e["event"] == "generation" and not e["lost"], timeout_s=60)
        steps = [e["seconds"] for e in events.all if e["event"] == "step"]
    return outages, median(steps)


def measure_torchrun(step_s: float) -> float:
    """Kill to the next finished step when torchrun restarts everybody from a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--max-restarts=3", f"--nproc-per-node={REPLICAS * STAGES}"),
                *(str(HERE / "torchrun_job.py"), "100000", str(step_s), name),
            ],
            # Without it torchrun hangs in about a third of restarts.
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            before = _wait_steps(folder, more_than=5, timeout_s=180)
            os.kill(int((folder / "pid5").read_text()), signal.SIGKILL)
            killed_at = time.time()
            after = _wait_steps(folder, more_than=before + 1, timeout_s=180, since=killed_at + 0.5)
            say(f"torchrun: step {after} is there")
            lines = (folder / "steps").read_text().splitlines()
            first = next(float(line.split()[0]) for line in lines if _time(line) > killed_at + 0.5)
            return first - killed_at
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _time(line: str) -> float:
    return float(line.split(maxsplit=1)[0])


def _wait_steps(folder: Path, *, more_than: int, timeout_s: float, since: float = 0.0) -> int:
    """How many steps there are, when there are enough, the last of them after `since`."""
    deadline_s = time.monotonic() + timeout_s
    log = folder / "steps"
    while time.monotonic() < deadline_s:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) > more_than and _time(lines[-1]) > since:
            return len(lines)
        time.sleep(0.02)
    raise SystemExit(f"torchrun made no {more_than} steps in {timeout_s} s")


def measure_losses(slot_s: float, steps_each: int) -> list[tuple[int, float, float]]:
    """(workers lost, median step, planned period), each loss in another stage."""
    kills = ["1:2", "0:1", "2:3"]
    first = 8
    flags = ["--replace-after", "never"]
    for number, place in enumerate(kills):
        flags += ["--kill", f"{place}@{first + (number + 1) * steps_each}"]
    total = first + (len(kills) + 1) * steps_each
    with emulated_run(total, slot_s, *flags) as events:
        events.wait(lambda e: e["event"] == "finished", timeout_s=200)
        found = []
        plan: dict[str, Any] = {}
        seconds: list[float] = []
        for event in [*events.all, {"event": "generation"}]:
            if event["event"] in ("generation", "replanned"):
                if seconds:
                    # The first two of a generation fill the pipeline.
                    found.append((len(plan["lost"]), median(seconds[2:]), plan["period"]))
                plan, seconds = event, []
            elif (
                event["event"] == "step"
                and plan.get("unit") == "seconds"
                and event["step"] >= plan.get("from_step", 0)
            ):
                seconds.append(event["seconds"])
    return found


def measure_one_f_one_b(slot_s: float) -> float:
    """The fault-free step of torch's own 1F1B on the same devices; one replica, so no reduction."""
    times = (slot_s, slot_s, slot_s)
    seconds: list[float] = run_other(
        "torch_pipeline.py", "1f1b", STAGES, MICROBATCHES, SETTLE_STEPS + 12, *times
    )
    return median(seconds[SETTLE_STEPS:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    losses: list[tuple[int, float, float]]
    one_f_one_b_s: float


def show_losses(slot_s: float) -> Iterator[bool]:
    """Whether each bar is met."""
    rounds = []
    for number in range(LOSS_ROUNDS):
        say(f"throughput after losses, round {number + 1} of {LOSS_ROUNDS}")
        one_f_one_b_s = measure_one_f_one_b(slot_s)
        rounds.append(Round(losses=measure_losses(slot_s, 14), one_f_one_b_s=one_f_one_b_s))
    for found in zip(*(each.losses for each in rounds), strict=True):
        num_lost = found[0][0]
        ratios = [measured / planned for _, measured, planned in found]
        steps, plans = (", ".join(f"{row[at]:.3f}" for row in found) for at in (1, 2))
        print(f"  {num_lost} lost: steps of {steps} s, plans of {plans} s")
        yield report(
            f"3x4x6, {num_lost} lost: step / plan",
            f"{median(ratios):.3f}",
            f"<= {PLAN_BAR}",
            is_met=median(ratios) <= PLAN_BAR,
        )
        if num_lost == 1:
            against = [row[1] / each.one_f_one_b_s for row, each in zip(found, rounds, strict=True)]
            theirs = ", ".join(f"{each.one_f_one_b_s:.3f}" for each in rounds)
            yield report(
                f"  over torch's Schedule1F1B, nobody lost: {theirs} s",
                f"{median(against):.3f}",
                f"<= {ONE_LOSS_BAR}",
                is_met=median(against) <= ONE_LOSS_BAR,
            )


def show_torchft(step_s: float) -> None:
    if not is_installed():
        print("  torchft is not installed: left out")
        return
    for what, heartbeat_ms in (("default", 5000), ("1 s heartbeat", 1000)):
        stall_s = measure_torchft(step_s, heartbeat_ms=heartbeat_ms)
        print(f"  torchft, {what}: {stall_s:.2f} s, and then a replica less", flush=True)


def report(what: str, value: str, bar: str, *, is_met: bool) -> bool:
    print(f"{what:58}{value:>22}   {bar}: {'met' if is_met else 'MISSED'}", flush=True)
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-others", action="store_true", help="no torchrun, no torchft")
    options = parser.parse_args()
    outages, step_s = measure_outages(options.kills, seed=options.seed)
    times = sorted(outage.seconds for outage in outages)
    results = [
        report(
            f"kill to next step, median of {len(times)} (step {step_s:.3f} s)",
            f"{median(times):.3f} s",
            f"<= {MEDIAN_BAR_S} s + a step",
            is_met=median(times) <= MEDIAN_BAR_S + step_s,
        ),
        report(
            "kill to next step, worst",
            f"{times[-1]:.3f} s",
            f"<= {WORST_BAR_S} s + a step",
            is_met=times[-1] <= WORST_BAR_S + step_s,
        ),
    ]
    parts = {name: median(o.parts[name] for o in outages) for name in outages[0].parts}
    shown = ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in parts.items())
    print(f"  of which (medians, ms): {shown}")
    if not options.skip_others:
        show_torchft(step_s)
        restart_s = measure_torchrun(step_s)
        ratio = restart_s / median(times)
        results.append(
            report(
                f"torchrun, restart from a checkpoint ({restart_s:.1f} s), times",
                f"{ratio:.1f} x",
                f">= {FASTER_BAR:g} x",
                is_met=ratio >= FASTER_BAR,
            )
        )
    results += show_losses(0.03)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
