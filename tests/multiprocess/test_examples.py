"""The examples run as their headers say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from live import run_live

EXAMPLES = Path(__file__).parents[2] / "examples"


def command(directory: Path) -> list[str]:
    script = str(EXAMPLES / "autosave.py")
    return [sys.executable, "-u", script, "--directory", str(directory), "--steps", "800"]


def last_line(text: str) -> str:
    return text.splitlines()[-1].rpartition("; ")[2]


def test_the_autosave_example_ends_the_same_however_it_was_stopped(tmp_path: Path) -> None:
    whole = subprocess.run(
        command(tmp_path / "whole"), check=True, capture_output=True, text=True, timeout=100
    )
    stopped = command(tmp_path / "stopped")
    with subprocess.Popen(stopped, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert "step   500" in first.stdout.readline()
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(60) == -signal.SIGTERM
    again = subprocess.run(stopped, check=True, capture_output=True, text=True, timeout=100)
    assert again.stdout.startswith("goes on after step ")
    assert last_line(again.stdout) == last_line(whole.stdout)


def test_the_gpt_example_goes_on_when_a_worker_is_killed(tmp_path: Path) -> None:
    settings = ("--steps", 12, "--width", 16, "--length", 16)
    said = []
    for flags in ((), ("--kill", "1:1@5")):
        run = run_live(
            EXAMPLES / "gpt.py",
            *settings,
            replicas=2,
            stages=2,
            events=tmp_path / f"{len(flags)}.jsonl",
            flags=flags,
        )
        assert run.status == 0, run.output
        assert len(run.of("worker_lost")) == len(flags) // 2
        said.append([line for line in run.output.splitlines() if "has not seen" in line])
    assert len(said[0]) == 1
    assert said[0][0].rpartition(" ")[2] == said[1][0].rpartition(" ")[2]
