"""Shows: how long simulations take, and that their cost follows the number of changes.
Run:   python benchmarks/simulator.py [--faults FILE] [--live]      (about two minutes, and three)

1. 4,096 workers over the 348 days of the LLM-cluster fault trace, all systems (needs the file; a
   generated trace with as many losses stands in without it): time and memory.
2. 256 workers over 30 days, all systems.
3. The loop alone at 3 sizes of trace: seconds per thousand changes.
4. With --live: live runs on emulated devices, with nobody, 2 and 20 workers killed, each replayed:
   predicted against measured time, and where they part. --live-only leaves out the others.
Exits with status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

from everstep.sim.generate import Kind, Rates, generate
from everstep.sim.model import PRESETS, describe
from everstep.sim.read_trace import read_trace
from everstep.sim.results import simulate
from everstep.sim.setting import Failures, Setting
from everstep.sim.trace import DAY_S, HOUR_S, Trace, fit
from everstep.sim.validate import BAR_FRACTION
from live_validation import SLOT_S, validations

LARGE_BAR_S, MEMORY_BAR_BYTES, MEDIUM_BAR_S = 60.0, 1e9, 5.0
LINEAR_BAR = 2.0
"""The dearest size may cost so many times as much per change as the cheapest."""

NUM_SERVERS = 400
"""In the cluster of the fault trace."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(what: str, value: str, bar: str, *, is_met: bool) -> bool:
    print(f"{what:62}{value:>14}   {bar}: {'met' if is_met else 'MISSED'}", flush=True)
    return is_met


def large_trace(faults: Path | None) -> Trace:
    if faults is not None:
        return fit(read_trace(faults, num_servers=NUM_SERVERS), 512, seed=0)
    say("no --faults file: a generated trace stands in")
    rates = Rates(mtbf_s=230 * DAY_S, repair_s=6 * DAY_S)
    return generate(Kind.RACKS, rates, num_nodes=512, duration_s=348 * DAY_S, seed=0)


def large_setting(trace: Trace) -> Setting:
    job = describe(
        PRESETS["gpt-39b"].model, name="gpt-39b", replicas=128, stages=32, microbatches=16
    )
    return Setting(job=job, failures=Failures.of(trace), workers_per_node=8)


def medium() -> tuple[Trace, Setting]:
    rates = Rates(mtbf_s=20 * DAY_S, repair_s=4 * HOUR_S)
    trace = generate(Kind.EXPONENTIAL, rates, num_nodes=32, duration_s=30 * DAY_S, seed=0)
    job = describe(
        PRESETS["gpt-18.4b"].model, name="gpt-18.4b", replicas=32, stages=8, microbatches=16
    )
    return trace, Setting(job=job, failures=Failures.of(trace), workers_per_node=8)


def seconds_of(trace: Trace, setting: Setting) -> tuple[float, float]:
    """On the clock, and on a core: the second tells what a busy machine hides."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    simulate(trace, setting)
    taken_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - began_cpu_s
    say(f"{taken_s:.1f} s, of which {cpu_s:.1f} s on a core; load {os.getloadavg()[0]:.1f}")
    return taken_s, cpu_s


def per_thousand_changes() -> list[tuple[int, float]]:
    """(changes, seconds on a core per thousand of them). Plans are made beforehand: they have their
    own budget, whatever the length of the trace."""
    job = describe(
        PRESETS["gpt-18.4b"].model, name="gpt-18.4b", replicas=32, stages=8, microbatches=16
    )
    rates = Rates(mtbf_s=20 * DAY_S, repair_s=4 * HOUR_S)
    found = []
    for days in (100, 1_000, 10_000):
        duration_s = days * DAY_S
        trace = generate(Kind.EXPONENTIAL, rates, num_nodes=32, duration_s=duration_s, seed=1)
        setting = Setting(job=job, failures=Failures.of(trace), workers_per_node=8, plan_budget=0)
        seconds_of(trace, setting)
        num_changes = len(list(trace.changes()))
        found.append((num_changes, seconds_of(trace, setting)[1] / num_changes * 1000))
    return found


def costs(faults: Path | None) -> list[bool]:
    trace = large_trace(faults)
    taken_s, _ = seconds_of(trace, large_setting(trace))
    days = trace.duration_s / DAY_S
    results = [
        report(
            f"4,096 workers, {days:.0f} days, {trace.num_losses} losses, all systems",
            f"{taken_s:.1f} s",
            f"< {LARGE_BAR_S:g} s",
            is_met=taken_s < LARGE_BAR_S,
        )
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.append(
        report(
            "  peak memory of the process",
            f"{peak / 1e6:.0f} MB",
            f"< {MEMORY_BAR_BYTES / 1e6:.0f} MB",
            is_met=peak < MEMORY_BAR_BYTES,
        )
    )
    trace, setting = medium()
    taken_s, _ = seconds_of(trace, setting)
    results.append(
        report(
            f"256 workers, 30 days, {trace.num_losses} losses, all systems",
            f"{taken_s:.1f} s",
            f"< {MEDIUM_BAR_S:g} s",
            is_met=taken_s < MEDIUM_BAR_S,
        )
    )
    per_thousand = per_thousand_changes()
    for num_changes, cost_s in per_thousand:
        print(f"  256 workers, {num_changes:6,} changes: {cost_s:.2f} s of a core per thousand")
    ratio = max(cost for _, cost in per_thousand) / min(cost for _, cost in per_thousand)
    results.append(
        report(
            "dearest change / cheapest, over the sizes",
            f"{ratio:.2f}",
            f"<= {LINEAR_BAR:g}",
            is_met=ratio <= LINEAR_BAR,
        )
    )
    return results


def live(options: argparse.Namespace) -> list[bool]:
    results = []
    runs = validations(
        num_kills=options.kills, seed=options.seed, slot_s=options.slot, keep=options.keep
    )
    for name, found in runs.items():
        times = f"{found.predicted_s:.2f} s predicted, {found.measured_s:.2f} s measured"
        results.append(
            report(
                f"live, {name}: {times}",
                f"{found.error_fraction:+.2%}",
                f"<= {BAR_FRACTION:.0%}",
                is_met=found.is_within_bar,
            )
        )
        for part in found.parts:
            print(
                f"  {part.number:4} {part.kind:12}{part.predicted_s:8.2f} s predicted,"
                f"{part.measured_s:8.2f} s measured,{part.difference_s:+7.2f} s"
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=Path, help="llm-cluster-faults.json")
    parser.add_argument("--live", action="store_true", help="live runs, too")
    parser.add_argument("--live-only", action="store_true", help="live runs, and nothing else")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slot", type=float, default=SLOT_S, help="seconds of F, of B and of W")
    parser.add_argument("--keep", type=Path, help="a folder for the events of the live runs")
    options = parser.parse_args()
    results = [] if options.live_only else costs(options.faults)
    if options.live or options.live_only:
        results += live(options)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
