"""Ctrl-C and SIGTERM end everything."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

import endless_job
from live import Live, command, of, read_events

END_WITHIN_S = 5.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_ends_every_process_of_a_run_and_frees_its_port(
    tmp_path: Path, number: signal.Signals
) -> None:
    events = tmp_path / "events.jsonl"
    shape = ("--replicas", 2, "--stages", 2)
    argv = command("run", *shape, "--events", events, endless_job.__file__)
    with Live(argv, variables={"XDG_RUNTIME_DIR": str(tmp_path)}) as live:
        live.wait_events(events, "step", 8)
        # The launcher, the warm parent and four workers.
        assert len(live.left_behind()) == 6
        if number is signal.SIGINT:
            os.killpg(live.process.pid, number)  # as a terminal does
        else:
            live.process.send_signal(number)
        status, output = live.wait(within_s=END_WITHIN_S)
        assert live.left_behind() == []
    assert status == 128 + number, output
    assert output.count(f"everstep: {number.name} was received") == 1, output
    assert "Traceback" not in output
    assert len(of(read_events(events), "stopped")) == 1
    (started,) = of(read_events(events), "started")
    host, _, port = started["address"].rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0
    assert list(tmp_path.rglob("*.json")) == [], "the job is still announced"
