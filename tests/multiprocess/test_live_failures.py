"""What the user got wrong ends the whole job, said once."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import bad_job
import failing_job
from live import LiveRun, run_live

SHAPES = {
    "before training": (2, 2),
    "between steps": (2, 2),
    "after training": (2, 1),
    "in the model": (2, 2),
    "in the dataset": (1, 2),
}


def check_said_once(live: LiveRun) -> str:
    """The traceback of one worker, in the output as in the events, and no other anywhere."""
    assert live.status == 1, live.output
    (failed,) = live.of("failed")
    traceback: str = failed["traceback"].strip()
    assert live.output.count(traceback) == 1, live.output
    assert live.output.count("Traceback") == traceback.count("Traceback"), live.output
    assert live.output.count(failed["why"]) == 1, live.output
    assert "runpy" not in traceback
    assert live.left_behind == []
    return traceback


@pytest.mark.parametrize("where", failing_job.PLACES)
def test_an_exception_in_user_code_ends_the_job_with_its_traceback_once(
    tmp_path: Path, where: str
) -> None:
    replicas, stages = SHAPES[where]
    live = run_live(
        Path(failing_job.__file__),
        where,
        replicas=replicas,
        stages=stages,
        events=tmp_path / "events.jsonl",
    )
    ended = time.time()
    traceback = check_said_once(live)
    assert f"Broken: {where}" in traceback
    assert re.search(r'failing_job.py", line \d+, in \w+\n *raise Broken', traceback)
    assert ended - live.of("failed")[0]["time"] < 10
    trained = [event["step"] for event in live.of("step")]
    assert trained == list(range(len(trained)))
    assert (len(trained) == 20) == (where == "after training")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("indivisible", (2, 1), "batch_size is 18: must be a multiple of 4 (2 replicas x 2"),
        ("few layers", (1, 3), "num_stages is 3: must be at most 2, the number of layers"),
        ("growing", (1, 2), "shapes and types between stages may not change"),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused_once_with_the_rule(
    tmp_path: Path, name: str, shape: tuple[int, int], message: str
) -> None:
    replicas, stages = shape
    live = run_live(
        Path(bad_job.__file__),
        name,
        replicas=replicas,
        stages=stages,
        events=tmp_path / "events.jsonl",
    )
    traceback = check_said_once(live)
    assert message in traceback.splitlines()[-1]
    assert live.of("step") == []
