"""Live runs on emulated devices, each replayed by the simulator: predicted against measured.

Part of benchmarks/simulator.py (`--live`). 3 x 4 x 6 throughout: nobody lost; two workers killed at
given steps and replaced; workers killed with -9 at random moments, replacements joining in between.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from everstep.sim.live_run import live_run
from everstep.sim.validate import Validation, validate
from recovery import Events, emulated_run

SLOT_S = 0.03
"""F, B and W each: steps of about 0.6 s. Twelve workers keep two cores 22 % busy with it, 43 % with
10 ms, and then whatever else the machine does makes the devices slower or faster."""

KILL_AFTER_SLOTS = (60.0, 120.0)
"""Since the last replacement came in: one to four steps."""

END_WITHIN_S = 120.0
QUIET_STEPS = 12
"""Before the first kill: what an action takes is read there."""


def validations(
    *, num_kills: int, seed: int, slot_s: float = SLOT_S, keep: Path | None = None
) -> dict[str, Validation]:
    """By what was done to each run. `keep`: a folder for their events."""
    two = ("--replace-after", "2", "--kill", "1:2@25", "--kill", "0:1@45")
    runs = {
        "nobody lost": run_to_end(40, slot_s),
        "2 killed": run_to_end(65, slot_s, *two),
        f"{num_kills} killed": run_with_kills(num_kills, slot_s, seed=seed),
    }
    found = {}
    for name, events in runs.items():
        if keep is not None:
            lines = [json.dumps(event) + "\n" for event in events.all]
            (keep / f"{name.replace(' ', '-')}.jsonl").write_text("".join(lines))
        found[name] = validate(live_run(events.all, name=name))
    return found


def run_to_end(steps: int, slot_s: float, *flags: str) -> Events:
    with emulated_run(steps, slot_s, *flags) as events:
        events.wait(lambda event: event["event"] == "finished", timeout_s=END_WITHIN_S)
    _say(events, f"{steps} steps")
    return events


def run_with_kills(num_kills: int, slot_s: float, *, seed: int) -> Events:
    rng = random.Random(seed)
    with emulated_run(100_000, slot_s, "--replace-after", "0.3") as events:
        first = events.wait(lambda event: event["event"] == "replanned", timeout_s=60)["from_step"]
        events.wait(lambda event: _is_step(event, first + QUIET_STEPS), timeout_s=60)
        for _ in range(num_kills):
            time.sleep(slot_s * rng.uniform(*KILL_AFTER_SLOTS))
            events.poll()
            _, pid = rng.choice(sorted(events.pids().items()))
            os.kill(pid, signal.SIGKILL)
            events.wait(lambda event: event["event"] == "recovered", timeout_s=30)
            if events.lost():  # else the replacement joined before the first step was done
                events.wait(_is_whole, timeout_s=60)
        events.wait(lambda event: event["event"] == "step", timeout_s=30)
    _say(events, f"{num_kills} kills")
    return events


def _is_step(event: dict[str, Any], at_least: int) -> bool:
    return bool(event["event"] == "step" and event["step"] >= at_least)


def _is_whole(event: dict[str, Any]) -> bool:
    return event["event"] == "generation" and not event["lost"]


def _say(events: Events, what: str) -> None:
    seconds = events.all[-1]["time"] - events.all[0]["time"]
    load = os.getloadavg()[0]
    print(f"live run, {what}: {seconds:.0f} s, load {load:.1f}", file=sys.stderr, flush=True)
