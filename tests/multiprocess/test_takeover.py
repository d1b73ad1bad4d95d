"""The coordinator is killed with -9 and started again; the workers of its agent train on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from equality_job import STEPS, plain
from live import command, environment, read_events

pytestmark = pytest.mark.timeout(100)

torch.set_num_threads(1)

HOST = "127.0.0.1"
RELATIVE = 1e-5
SLOWLY = """
    import sys, time
    import everstep
    from equality_job import STEPS, job

    run = everstep.train(job("mlp", "adamw", sys.argv[1]), steps=STEPS)
    for step in run:
        time.sleep(0.05)
    run.state_dict()
"""


class Cluster:
    """A coordinator that can be killed and started again, and an agent that runs 2 x 2 workers."""

    def __init__(self, folder: Path, *, clip: str = "none") -> None:
        self.events_file = folder / "events.jsonl"
        script = folder / "train.py"
        script.write_text(dedent(SLOWLY))
        with socket.create_server((HOST, 0)) as probe:
            self.port = probe.getsockname()[1]
        self._output = (folder / "output.txt").open("w+")
        self.coordinator = self._start_coordinator()
        self.agent = self._start(
            "agent", "--join", f"{HOST}:{self.port}", "--workers", 4, script, clip
        )

    def _start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(*arguments),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            start_new_session=True,
        )

    def _start_coordinator(self) -> subprocess.Popen[str]:
        shape = ("--replicas", 2, "--stages", 2, "--replace-after", 0)
        where = ("--host", HOST, "--port", self.port, "--events", self.events_file)
        return self._start("coordinator", *shape, *where)

    def kill_coordinator(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()

    def start_coordinator_again(self) -> None:
        self.coordinator = self._start_coordinator()

    def kill_worker(self, replica: int, stage: int) -> None:
        place = {"replica": replica, "stage": stage}
        joined = [e for e in self.of("worker_joined") if place.items() <= e.items()]
        os.kill(joined[-1]["pid"], signal.SIGKILL)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in read_events(self.events_file) if entry["event"] == event]

    def wait_steps(self, count: int) -> None:
        deadline_s = time.monotonic() + 60
        while len(self.of("step")) < count:
            assert time.monotonic() < deadline_s, f"step {count} was not reached:\n{self.output()}"
            assert self.agent.poll() is None, self.output()
            time.sleep(0.02)

    def wait_end(self) -> None:
        for process in (self.coordinator, self.agent):
            assert process.wait(60) == 0, self.output()

    def output(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def close(self) -> None:
        for process in (self.coordinator, self.agent):
            if process.poll() is None:
                process.kill()  # the workers die with their agent
                process.wait()
        self._output.close()

    def check(
        self, *, lives: int, clip_norm: float | None = None, is_anybody_left: bool = True
    ) -> None:
        steps = self.of("step")
        assert [event["step"] for event in steps] == list(range(STEPS))
        losses = [event["loss"] for event in steps]
        assert losses == pytest.approx(reference(clip_norm), rel=RELATIVE)
        assert len(self.of("started")) == lives
        if is_anybody_left:
            assert len(self.of("took_over")) == lives - 1
        assert len(self.of("finished")) == 1


@cache
def reference(clip_norm: float | None) -> list[float]:
    return plain("mlp", "adamw", replicas=2, stages=2, steps=STEPS, clip_norm=clip_norm).losses


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


def test_a_coordinator_that_was_killed_takes_over_and_nothing_changes(cluster: Cluster) -> None:
    cluster.wait_steps(6)
    cluster.kill_coordinator()
    time.sleep(1)
    cluster.start_coordinator_again()
    cluster.wait_end()
    cluster.check(lives=2)
    # Training simply went on: nobody was lost, and no generation was formed.
    assert len(cluster.of("generation")) == 1
    assert cluster.of("worker_lost") == []
    assert len(cluster.of("worker_joined")) == 4


def test_a_worker_that_died_while_the_coordinator_was_away_is_handled_then(
    cluster: Cluster,
) -> None:
    cluster.wait_steps(6)
    cluster.kill_coordinator()
    cluster.kill_worker(1, 1)
    time.sleep(0.5)
    cluster.start_coordinator_again()
    cluster.wait_end()
    cluster.check(lives=2)
    (lost,) = cluster.of("worker_lost")
    assert (lost["replica"], lost["stage"], lost["how"]) == (1, 1, "killed by SIGKILL")
    assert cluster.of("generation")[1]["lost"] == ["1:1"]


def test_a_coordinator_may_be_killed_again(cluster: Cluster) -> None:
    for count in (4, 12):
        cluster.wait_steps(count)
        cluster.kill_coordinator()
        cluster.start_coordinator_again()
    cluster.wait_end()
    cluster.check(lives=3)
    assert len(cluster.of("generation")) == 1


def test_a_loss_that_was_being_handled_is_handled_by_the_next_coordinator(
    cluster: Cluster,
) -> None:
    cluster.wait_steps(6)
    cluster.kill_worker(0, 1)
    cluster.kill_coordinator()
    cluster.start_coordinator_again()
    cluster.wait_end()
    cluster.check(lives=2)
    assert cluster.of("generation")[1]["lost"] == ["0:1"]


def test_a_coordinator_that_misses_the_last_steps_still_ends_the_job(cluster: Cluster) -> None:
    """It may find workers that have finished, or only their agent, which saw them end well."""
    cluster.wait_steps(STEPS)
    cluster.kill_coordinator()
    time.sleep(0.5)
    cluster.start_coordinator_again()
    cluster.wait_end()
    cluster.check(lives=2, is_anybody_left=False)


def test_steps_that_are_taken_again_survive_a_take_over(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, clip="post-validated:0.3")
    try:
        for count in (4, 12):
            cluster.wait_steps(count)
            cluster.kill_coordinator()
            cluster.start_coordinator_again()
        cluster.wait_end()
        cluster.check(lives=3, clip_norm=0.3)
        assert cluster.of("rollback")
    finally:
        cluster.close()
