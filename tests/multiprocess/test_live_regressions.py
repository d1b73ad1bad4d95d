"""Bugs of live runs, each with its story."""

from __future__ import annotations

import subprocess
from pathlib import Path

import equality_job
from live import command, environment


def test_a_reader_that_leaves_does_not_hang_the_job(tmp_path: Path) -> None:
    """`everstep run ... | head` hung: the broken pipe was raised while an event was handled, was
    taken for a fault of the worker whose message it was, and nobody was told to stop.
    Now what cannot be shown is not shown, and the job goes on to its end."""
    run = command(
        *("run", "--replicas", 1, "--stages", 2, equality_job.__file__),
        *("mlp", "sgd", "none", tmp_path / "out.pt"),
    )
    with subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    ) as job:
        assert job.stdout is not None
        job.stdout.readline()
        job.stdout.close()
        assert job.wait(60) == 0
    assert (tmp_path / "out.pt").exists()
