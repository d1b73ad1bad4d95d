"""Kills one of two torchft replicas and times how long the other makes no step."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
REPLICAS = 2


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


def measure_torchft(step_s: float, *, heartbeat_ms: int) -> float:
    """Seconds from kill -9 of one replica to the survivor's next committed step."""
    with tempfile.TemporaryDirectory() as name, _lighthouse(heartbeat_ms) as address:
        folder = Path(name)
        processes = [_start(folder, number, step_s, address) for number in range(REPLICAS)]
        try:
            _wait(folder / "0", lambda lines: sum(n == REPLICAS for _, n in lines) > 5)
            time.sleep(1.0)
            killed_at = time.time()
            processes[1].send_signal(signal.SIGKILL)
            lines = _wait(folder / "0", lambda lines: lines[-1][0] > killed_at + 2 * step_s)
            return next(at for at, _ in lines if at > killed_at + step_s / 2) - killed_at
        finally:
            for process in processes:
                process.kill()
                process.wait()


@contextmanager
def _lighthouse(heartbeat_ms: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).parent / "torchft_lighthouse"), "--bind", f"[::]:{port}"),
            *("--min_replicas", "1", "--join_timeout_ms", "10000"),
            *("--heartbeat_timeout_ms", str(heartbeat_ms)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _start(folder: Path, number: int, step_s: float, address: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, str(HERE / "torchft_job.py"), f"replica_{number}"),
            *(str(step_s), str(folder / str(number))),
        ],
        env={**os.environ, "TORCHFT_LIGHTHOUSE": address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait(log: Path, is_enough: object, *, timeout_s: float = 120.0) -> list[tuple[float, int]]:
    assert callable(is_enough)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        text = log.read_text() if log.exists() else ""
        pairs = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        lines = [(float(at), int(number)) for at, number in pairs]
        if lines and is_enough(lines):
            return lines
        time.sleep(0.02)
    raise SystemExit(f"torchft made no step in {timeout_s:.0f} s")
