"""Runs `everstep` on scripts, as a user does, and reads what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

LIVE_WITHIN_S = 100
POLL_S = 0.02

MARK = "LIVE_TEST_MARK"
"""An environment variable: whoever descends from a command carries it, in any group or session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    status: int
    output: str
    events: list[dict[str, Any]]
    left_behind: list[int] = field(default_factory=list)
    """Processes that were still there when the command had ended."""

    def of(self, event: str) -> list[dict[str, Any]]:
        return of(self.events, event)


def environment() -> dict[str, str]:
    """The tests' own modules are importable by the scripts."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def command(*arguments: object) -> list[str]:
    program = "from everstep.cli.main import main; main()"
    return [sys.executable, "-c", program, *map(str, arguments)]


class Live:
    """A command under way. Whatever of it is left when the block ends is killed."""

    def __init__(self, argv: Sequence[str], *, variables: Mapping[str, str] | None = None) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment(), **(variables or {}), name: value},
            start_new_session=True,
        )

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left_behind():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def wait(self, *, within_s: float = LIVE_WITHIN_S) -> tuple[int, str]:
        """Its exit status and all it said."""
        try:
            output, _ = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"it did not end in {within_s} s:\n{output}") from None
        return self.process.returncode, output

    def wait_events(self, path: Path, event: str, count: int) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + LIVE_WITHIN_S
        while len(found := of(read_events(path), event)) < count:
            assert time.monotonic() < deadline_s, f"{len(found)} {event} events, not {count}"
            assert self.process.poll() is None, self.wait()
            time.sleep(POLL_S)
        return found

    def kill_all(self) -> None:
        """All at one moment, as when a machine loses its power: those who die last would otherwise
        go on without the others for a step, and save it."""
        pids = self.left_behind()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, number)
        self.process.wait(LIVE_WITHIN_S)

    def left_behind(self) -> list[int]:
        """Every process that descends from the command, itself included. Zombies do not count."""
        return [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and self._mark.encode() in _environment_of(folder)
        ]


def _environment_of(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is somebody else's
        return []


def run_live(
    script: Path, *args: object, replicas: int, stages: int, events: Path, flags: Sequence[str] = ()
) -> LiveRun:
    """`everstep run` on a script, to its end."""
    shape = ("--replicas", replicas, "--stages", stages)
    argv = command("run", *shape, "--events", events, *flags, script, *args)
    with Live(argv) as live:
        status, output = live.wait()
        return LiveRun(
            status=status,
            output=output,
            events=read_events(events),
            left_behind=live.left_behind(),
        )


def read_events(path: Path) -> list[dict[str, Any]]:
    """The last line may still be being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def of(events: Sequence[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in events if entry["event"] == event]
