"""Shows: what logging costs, how fast a lost stage is replayed, and what a run with failures gains.
Run:   python benchmarks/logging_and_replay.py      (about 14 minutes; --quick, --only PART ...)

All on one pipeline of 4 emulated devices, whose F, B and W sleep; messages, logs, checkpoints,
worker starts and replays are real.
  cost      steps with the log and without that take turns in one run; spilling to disk, in memory
  replay    seconds per lost step, from two replays of different length, alone and with 3 helpers
  failures  a whole run with failures: with the log; restarting everybody from the newest checkpoint
            (the same checkpoints); restarting from snapshots as often as CheckFreq takes them
  curve     budget against expected recovery, with the sizes and times measured by `cost`
Two more have no bar, and run only when named:
  uneven    replay of 10 micro-batches on 4 workers
  light     failures with a state so small that snapshots cost next to nothing: a log gains nothing
Exits with status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, median, quantiles

from everstep.recovery.grouping import Boundary, Costs, StageCost, tradeoff
from launched import say
from log_turns import is_logged, ratios, turn_times_s
from logged_runs import STAGES, LoggedRun, Replayed, Setting, run_logged

COST_BAR, HELP_BAR, FAILURES_BAR = 1.01, 2.4, 1.16
NUM_HELPERS = 3
RECOVERY_PARTS = ("halting", "deciding", "groups", "state", "redo")
MB = 1e6

COST_EVERY = 8
COST = Setting(steps=92, slot_s=0.02, every=COST_EVERY, log_turns=COST_EVERY)
COST_FROM = 12
"""The first checkpoint is durable by then: from here on a log writes over its own files, as for the
rest of a run."""

SIDES = {"spilling to disk": "32MB", "all in memory": "4GB"}
"""The memory of each worker's log."""

# Twice in one interval: the second replay begins with the same checkpoint and is longer.
REPLAY = Setting(
    steps=41, slot_s=0.01, every=20, log_memory="64MB", kills=("0:1@25", "0:1@39"), helpers=0
)

# Messages in proportion to the times of `cost`. With 256 MB of state a stage a checkpoint takes a
# few steps to be durable, as the 9 s of BERT-large do at steps of 2.4 s (a summary of COCI's
# evaluation, FGCS 164, 2025).
FAILURES = Setting(steps=80, slot_s=0.007, message_bytes=500_000, every=40, state_bytes=256_000_000)
LIGHT = replace(FAILURES, message_bytes=1_000_000, state_bytes=64_000_000)
STEPS_PER_FAILURE, FAILURES_SEED = 40, 6
OURS, RESTART, CHECKFREQ = "everstep, log on", "restart from the checkpoint", "restart, CheckFreq's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    is_quick: bool
    message_bytes: int
    """Of each activation and each gradient, in `cost`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    what: str
    ratio: float
    bar: float
    is_most: bool = False
    """The ratio may be at most the bar; else it must be at least that."""

    @property
    def is_kept(self) -> bool:
        return self.ratio <= self.bar if self.is_most else self.ratio >= self.bar

    def __str__(self) -> str:
        relation = "<=" if self.is_most else ">="
        verdict = "kept" if self.is_kept else "MISSED"
        return f"{self.what:74} {self.ratio:6.3f}   {relation} {self.bar:g}: {verdict}"


def main() -> int:
    parts: dict[str, Callable[[Options], Iterator[Verdict]]] = {
        "cost": cost,
        "replay": replay,
        "failures": failures,
        "curve": curve,
        "uneven": uneven,
        "light": light,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--quick", action="store_true", help="one round, fewer steps")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts)[:4])
    parser.add_argument("--message-mb", type=float, default=2.0, help="in `cost`")
    args = parser.parse_args()
    options = Options(
        is_quick=args.quick,
        message_bytes=round(args.message_mb * MB),
    )
    # As with Ctrl-C, the side that is running is ended, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start", flush=True)
    missed = []
    for name in args.only:
        for verdict in parts[name](options):
            print(verdict, flush=True)
            if not verdict.is_kept:
                missed.append(verdict.what)
    print(f"load average {os.getloadavg()[0]:.1f} at the end; {len(missed)} bars missed")
    return 1 if missed else 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def cost(options: Options) -> Iterator[Verdict]:
    found = measure_cost(options)
    print(
        f"\ncost: 1x{STAGES}x{COST.microbatches}, F = B = W = {1e3 * COST.slot_s:g} ms,"
        f" {options.message_bytes / MB:g} MB a message"
    )
    for name, runs in found.items():
        turns_s = [_turn_times_s(run) for run in runs]
        each = sorted(ratio for turns in turns_s for ratio in ratios(turns))
        sides_ms = [
            1e3 * median(s for turns in turns_s for turn, s in turns.items() if turn % 2 == rest)
            for rest in (0, 1)
        ]
        low, _, high = quantiles(each)
        print(
            f"  {name:18} step {sides_ms[0]:.1f} ms, without the log {sides_ms[1]:.1f} ms; half of"
            f" {len(each)} pairs of turns between {low:.3f} and {high:.3f}{_held(runs)}",
            flush=True,
        )
        yield Verdict(
            what=f"step, {name} / without the log (mean of all pairs: {mean(each):.3f})",
            ratio=median(each),
            bar=COST_BAR,
            is_most=True,
        )


@cache
def measure_cost(options: Options) -> dict[str, list[LoggedRun]]:
    found: dict[str, list[LoggedRun]] = {name: [] for name in SIDES}
    for number in range(1 if options.is_quick else 3):
        for name, memory in SIDES.items():
            say(f"cost, round {number + 1}: {name}")
            side = replace(COST, message_bytes=options.message_bytes, log_memory=memory)
            found[name].append(run_logged(side))
    return found


def _held(runs: Sequence[LoggedRun]) -> str:
    run = runs[-1]
    return (
        f"; logged {_logged_step_bytes(run) / MB:.0f} MB a step; held at most by one worker:"
        f" {run.most('memory_bytes') / MB:.0f} MB in memory, {run.most('disk_bytes') / MB:.0f} MB"
        f" on disk; dropped {run.most('dropped_steps')} steps"
    )


def _turn_times_s(run: LoggedRun) -> dict[int, float]:
    steps = {step["step"]: float(step["seconds"]) for step in run.run.settled}
    steady = {step: seconds for step, seconds in steps.items() if step >= COST_FROM}
    return turn_times_s(steady, COST_EVERY)


def _logged_step_bytes(run: LoggedRun) -> float:
    """By all workers."""
    num_logged = sum(is_logged(step, COST_EVERY) for step in range(COST.steps))
    return sum(held["recorded_bytes"] for held in run.held) / num_logged


def replay(options: Options) -> Iterator[Verdict]:
    del options
    say("replay, alone")
    alone = run_logged(REPLAY)
    alone_s = _show_replay("alone", REPLAY, alone)
    say(f"replay, {NUM_HELPERS} helpers")
    setting = replace(REPLAY, helpers=NUM_HELPERS)
    helped_s = _show_replay(f"{NUM_HELPERS} helpers", setting, run_logged(setting))
    yield Verdict(
        what="replay of a lost step: alone / step of the pipeline",
        ratio=alone_s / alone.step_s,
        bar=1.0,
        is_most=True,
    )
    yield Verdict(
        what=f"replay of a lost step: alone / with {NUM_HELPERS} helpers",
        ratio=alone_s / helped_s,
        bar=HELP_BAR,
    )


def uneven(options: Options) -> Iterator[Verdict]:
    """Has no bar."""
    del options
    setting = replace(REPLAY, helpers=NUM_HELPERS, microbatches=REPLAY.microbatches + 2)
    say(f"replay, {NUM_HELPERS} helpers, {setting.microbatches} micro-batches")
    _show_replay(f"{NUM_HELPERS} helpers", setting, run_logged(setting))
    yield from ()


def _show_replay(who: str, setting: Setting, run: LoggedRun) -> float:
    """Seconds per lost step."""
    if len(run.replays) != len(setting.kills):
        sys.exit(f"{len(setting.kills)} workers were killed and {len(run.replays)} replayed")
    shorter, longer = sorted(run.replays, key=lambda each: each.num_steps)
    step_s = (longer.seconds - shorter.seconds) / (longer.num_steps - shorter.num_steps)
    once_s = shorter.seconds - shorter.num_steps * step_s
    print(
        f"\nreplay of stage 1, {setting.microbatches} micro-batches, {who}"
        f" ({longer.num_replayers} replay): {1e3 * step_s:.1f} ms a lost step and"
        f" {1e3 * once_s:.0f} ms once (from {_told(shorter)} and {_told(longer)});"
        f" a step of the pipeline: {1e3 * run.step_s:.1f} ms"
    )
    outages = ", ".join(f"{seconds:.2f}" for seconds in run.outages_s)
    print(f"  kill to the first step after it: {outages} s", flush=True)
    return step_s


def _told(replayed: Replayed) -> str:
    return f"{replayed.num_steps} steps in {replayed.seconds:.2f} s"


def failures(options: Options) -> Iterator[Verdict]:
    totals = measure_failures(FAILURES, (OURS, RESTART, CHECKFREQ), options)
    yield Verdict(
        what="total time: the better of the restarts / everstep with its log on",
        ratio=min(totals[RESTART], totals[CHECKFREQ]) / totals[OURS],
        bar=FAILURES_BAR,
    )


def light(options: Options) -> Iterator[Verdict]:
    """Has no bar."""
    totals = measure_failures(LIGHT, (OURS, CHECKFREQ), options)
    ratio = totals[CHECKFREQ] / totals[OURS]
    print(f"  CheckFreq's / everstep with its log on: {ratio:.3f}", flush=True)
    yield from ()


def measure_failures(setting: Setting, names: Sequence[str], options: Options) -> dict[str, float]:
    """Seconds of the whole run, by side: medians of three rounds in which the sides take turns."""
    num_steps = setting.steps // 2 if options.is_quick else setting.steps
    num_failures = num_steps // STEPS_PER_FAILURE
    kills = draw_kills(num_steps=num_steps, num_failures=num_failures, seed=FAILURES_SEED)
    plain = replace(setting, steps=num_steps, kills=kills)
    sides = {
        OURS: replace(plain, log_memory="64MB"),
        RESTART: plain,
        CHECKFREQ: replace(plain, every=None),
    }
    print(
        f"\nfailures: {num_steps} steps of 1x{STAGES}x{plain.microbatches}, F = B = W ="
        f" {1e3 * plain.slot_s:g} ms, {plain.state_bytes / MB:g} MB of state a stage,"
        f" {plain.message_bytes / MB:g} MB a message, a checkpoint every {plain.every} steps;"
        f" killed: {', '.join(kills)}",
        flush=True,
    )
    totals: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1 if options.is_quick else 3):
        for name in names:
            say(f"failures, {plain.state_bytes / MB:g} MB, round {number + 1}: {name}")
            run = run_logged(sides[name])
            totals[name].append(run.training_s)
            _show_total(name, run)
    return {name: median(seconds) for name, seconds in totals.items()}


def draw_kills(*, num_steps: int, num_failures: int, seed: int) -> tuple[str, ...]:
    """Memoryless failures of any stage at such a rate, and as many as that: drawn until it is so.
    None before the first plan from measured times, none in the last steps."""
    rng = random.Random(seed)
    while True:
        at, steps = 0.0, []
        while (at := at + rng.expovariate(num_failures / num_steps)) < num_steps - 5:
            steps.append(round(at))
        if len(steps) == num_failures and steps[0] > 8:
            return tuple(f"0:{rng.randrange(STAGES)}@{step}" for step in steps)


def _show_total(name: str, run: LoggedRun) -> None:
    saves = run.run.of("checkpoint")
    stalls_s = sum(save["stall_seconds"] for save in saves)
    durable_s = median(save["durable_seconds"] for save in saves)
    outages = ", ".join(f"{seconds:.2f}" for seconds in run.outages_s)
    print(
        f"  {name:28} {run.training_s:6.1f} s; kill to the next new step {outages} s;"
        f" {len(saves)} checkpoints, {stalls_s:.2f} s of stalls, {durable_s:.2f} s to durable",
        flush=True,
    )
    for recovered in run.run.of("recovered"):
        parts = ", ".join(f"{name} {recovered[name]:.2f}" for name in RECOVERY_PARTS)
        print(f"      a recovery of {recovered['seconds']:.2f} s: {parts}", flush=True)


def curve(options: Options) -> Iterator[Verdict]:
    """Has no bar."""
    run = measure_cost(options)["spilling to disk"][-1]
    bytes_each = _logged_step_bytes(run) / (STAGES - 1) / 2
    costs = Costs(
        stages=(StageCost(replay_s=run.compute_s),) * STAGES,
        boundaries=(Boundary(forward_bytes=int(bytes_each), backward_bytes=int(bytes_each)),)
        * (STAGES - 1),
        microbatches=COST.microbatches,
        interval_steps=COST_EVERY,
    )
    print(
        f"\ncurve: budget against expected recovery; {bytes_each / MB:.0f} MB a step, boundary and"
        f" direction, {1e3 * run.compute_s:.0f} ms to compute a stage's step,"
        f" {costs.interval_steps} steps between checkpoints, all stages fail alike"
    )
    print(f"  {'budget MB':>10} {'expected s':>11}   groups")
    for point in tradeoff(costs):
        groups = " ".join(str(list(group)) for group in point.groups)
        print(f"  {point.bytes / MB:10.0f} {point.expected_s:11.2f}   {groups}", flush=True)
    yield from ()


if __name__ == "__main__":
    sys.exit(main())
