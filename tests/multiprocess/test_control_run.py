"""Whole jobs of real processes that only pretend to train."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.timeout(60)

TESTS = Path(__file__).parents[1]

TRAIN = """
    import os, sys, time
    from everstep.launch.context import current_worker
    from everstep.membership import messages as m

    context = current_worker()
    client = context.connect(data_address=context.host + ":1")
    place = client.wait_welcome()
    steps = int(sys.argv[1])
    client.send(m.Ready(m.JobFacts(microbatches=2, steps=steps, batch_size=8, seed=0, digest="d")))
    resume = client.wait_resume(after_generation=0, timeout_s=30)
    for step in range(resume.step, steps):
        client.wait_watermark(step - 1, timeout_s=30)
        client.take_replan(step)
        if step == 1:
            print("half a line,", end=" ")
            print("then the rest")
        {body}
        loss = 1.0 / (1 + step) if place.stage == place.stages - 1 else None
        client.send(m.StepDone(generation=resume.generation, step=step, seconds=0.0, loss=loss))
        if step + 1 == resume.step + resume.profile_steps:
            client.send(m.Profile(resume.generation, m.StageProfile(
                forward=0.5, input_gradient=1, weight_gradient=1,
                transfer=0, reduction=0, optimizer=0)))
    client.wait_watermark(steps - 1, timeout_s=30)
    client.send(m.Finished())
    {after}
"""

RUN = """
    import sys
    from pathlib import Path
    from everstep.core.events import EventLog
    from everstep.launch.local import run_local
    from everstep.launch.warm import Script
    from everstep.membership.coordinator import Coordinator
    from everstep.membership.messages import Meeting
    from everstep.membership.roster import Shape
    from everstep.membership.world import World
    from fake_planner import one_f_one_b

    script, events, *args = sys.argv[1:]
    world = World(Shape(2, 2), planner=one_f_one_b, meeting=Meeting(host="127.0.0.1", port=1))
    with EventLog(Path(events)) as log:
        outcome = run_local(
            Script(Path(script), tuple(args)),
            coordinator=Coordinator(world, events=log),
            preload=("everstep.membership.client",),
        )
    print("OUTCOME", outcome.exit_code, outcome.why)
    sys.stdout.write(outcome.traceback or "")
    sys.exit(outcome.exit_code)
"""


class Job:
    """`run_local` in a process of its own."""

    def __init__(
        self, folder: Path, *, body: str = "pass", after: str = "", steps: int = 8
    ) -> None:
        self.events_file = folder / "events.jsonl"
        script = folder / "train.py"
        script.write_text(dedent(TRAIN).format(body=body, after=after))
        driver = folder / "driver.py"
        driver.write_text(dedent(RUN))
        self.process = subprocess.Popen(
            [sys.executable, driver, script, self.events_file, str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])},
        )

    def wait(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=40)
        return self.process.returncode, output

    def events(self, name: str) -> list[dict[str, object]]:
        if not self.events_file.exists():
            return []
        lines = self.events_file.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_events(self, name: str, count: int) -> list[dict[str, object]]:
        deadline_s = time.monotonic() + 30
        while len(found := self.events(name)) < count:
            assert time.monotonic() < deadline_s, f"only {len(found)} {name} events after 30 s"
            assert self.process.poll() is None, self.wait()
            time.sleep(0.02)
        return found

    def left_behind(self) -> list[int]:
        pids = [event["pid"] for event in self.events("worker_joined")]
        return [pid for pid in pids if isinstance(pid, int) and Path(f"/proc/{pid}").exists()]


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


def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path, body="time.sleep(0.05)", steps=10_000)
    job.wait_events("step", 2)
    job.process.kill()
    job.wait()  # ends when the last holder of its stdout is gone: the warm parent
    assert job.left_behind() == []
