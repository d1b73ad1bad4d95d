"""Starts the sides of a benchmark, each as a program of its own, and reads what it measured.

A line on stderr says what is running, because each takes seconds. Every process of a side is in
one group, which is ended with it whatever happens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
END_WITHIN_S = 300.0
SETTLE_STEPS = 2
"""Left out after a new plan: its first step still overlaps with the last one of the old plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EverstepRun:
    """What the events of one `everstep run` tell."""

    started_s: float
    """When the command was started, on the clock of the events."""

    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def first_step_s(self) -> float:
        """From the start of the command to the end of the first step."""
        return float(self.of("step")[0]["time"]) - self.started_s

    @property
    def planned_s(self) -> float:
        """The period of the plan made from measured durations."""
        return float(self.of("replanned")[-1]["period"])

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The steps that follow that plan and nothing older."""
        first = self.of("replanned")[-1]["from_step"] + SETTLE_STEPS
        return [step for step in self.of("step") if step["step"] >= first]

    @property
    def step_times_s(self) -> list[float]:
        return [float(step["seconds"]) for step in self.settled]


def run_everstep(
    script: str, *args: object, replicas: int, stages: int, flags: Sequence[object] = ()
) -> EverstepRun:
    """`everstep run` on one of the scripts beside this file. `flags`: further ones of `run`."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        shape = ("--replicas", replicas, "--stages", stages, "--events", events, *flags)
        program = "from everstep.cli.main import main; main()"
        started_s = time.time()
        _run(f"everstep {replicas}x{stages}", "-c", program, "run", *shape, FOLDER / script, *args)
        return EverstepRun(
            started_s=started_s,
            events=[json.loads(line) for line in events.read_text().splitlines()],
        )


def run_other(script: str, *args: object) -> Any:
    """A program that writes what it measured, as JSON, to the file named last."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        _run(f"{script.removesuffix('.py')} {args[0]}", FOLDER / script, *args, out)
        return json.loads(out.read_text())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(what: str, *arguments: object) -> None:
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=END_WITHIN_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
        raise
    if process.returncode != 0:
        sys.exit(f"{what} ended with {process.returncode}:\n{output}")
    say(f"  {what}: {time.monotonic() - began_s:.0f} s, load {os.getloadavg()[0]:.1f}")
