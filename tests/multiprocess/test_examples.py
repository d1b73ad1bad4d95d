"""The examples run as their headers say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "autosave.py"


def command(directory: Path) -> list[str]:
    return [sys.executable, "-u", str(EXAMPLE), "--directory", str(directory), "--steps", "800"]


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
