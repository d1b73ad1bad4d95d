"""Whole jobs of real processes that only pretend to train."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from control_job import Job

pytestmark = pytest.mark.timeout(60)


def test_every_step_of_a_job_is_in_the_events_file_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    code, output = job.wait()
    assert code == 0, output
    assert [event["step"] for event in job.events("step")] == list(range(8))
    assert [event["loss"] for event in job.events("step")] == [1 / (1 + t) for t in range(8)]
    places = [(event["replica"], event["stage"]) for event in job.events("worker_joined")]
    assert sorted(places, key=str) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(job.events("generation")) == 1
    assert [event["period"] for event in job.events("replanned")] == [2.0]
    assert len(job.events("finished")) == 1
    for label in ("0:0", "0:1", "1:0", "1:1"):
        assert f"[{label}] half a line, then the rest\n" in output
    assert job.left_behind() == []


def test_an_exception_in_the_script_ends_the_job_with_its_traceback_once(tmp_path: Path) -> None:
    job = Job(tmp_path, body="if step == 3: raise ValueError('no such sample')")
    code, output = job.wait()
    assert code == 1
    assert output.count("ValueError: no such sample") == 1, output
    assert output.count("Traceback") == 1
    assert "runpy" not in output
    assert len(job.events("failed")) == 1
    assert job.left_behind() == []


def test_an_exception_after_training_is_a_failure_too(tmp_path: Path) -> None:
    code, output = Job(tmp_path, after="raise OSError('disk full')").wait()
    assert code == 1
    assert output.count("OSError: disk full") == 1, output


def test_a_killed_worker_ends_the_job_and_is_named(tmp_path: Path) -> None:
    body = "if step == 2 and context.number == 3: os.kill(os.getpid(), 9)"
    job = Job(tmp_path, body=body)
    code, output = job.wait()
    assert code == 1, output
    (lost,) = job.events("worker_lost")
    assert (lost["replica"], lost["stage"]) == (1, 1)
    assert "worker 1:1" in output
    assert job.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_process_and_frees_the_port(tmp_path: Path, number: int) -> None:
    # From step 2 on these workers hear neither the coordinator nor SIGTERM: they must be killed.
    body = "if step == 2: import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    job = Job(tmp_path, body=body, steps=10_000)
    job.wait_events("step", 2)
    job.process.send_signal(number)
    code, output = job.wait()
    assert code == 128 + number, output
    assert job.left_behind() == []
    (started,) = job.events("started")
    port = int(str(started["address"]).rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_signal_need_not_wait_for_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(30)")
    job = Job(tmp_path, preload="slow_to_import")
    job.wait_events("agent_joined", 1)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.wait(within_s=20)
    assert code == 128 + signal.SIGTERM, output
    assert job.events("worker_joined") == []


def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path, body="time.sleep(0.05)", steps=10_000)
    job.wait_events("step", 2)
    job.process.kill()
    job.wait()  # ends when the last holder of its stdout is gone: the warm parent
    assert job.left_behind() == []
