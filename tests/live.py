"""Runs `everstep run` on a script, as a user does, and reads what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

LIVE_WITHIN_S = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    status: int
    output: str
    events: list[dict[str, Any]]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]


def environment() -> dict[str, str]:
    """The tests' own modules are importable by the scripts."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def command(*arguments: object) -> list[str]:
    program = "from everstep.cli.main import main; main()"
    return [sys.executable, "-c", program, *map(str, arguments)]


def run_live(
    script: Path, *args: object, replicas: int, stages: int, events: Path, flags: Sequence[str] = ()
) -> LiveRun:
    """Every process of the run is in one group, which is ended with the test whatever happens."""
    shape = ("--replicas", replicas, "--stages", stages)
    process = subprocess.Popen(
        command("run", *shape, "--events", events, *flags, script, *args),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIVE_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"everstep run did not end in {LIVE_WITHIN_S} s:\n{output}") from None
    return LiveRun(status=process.returncode, output=output, events=read_events(events))


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
