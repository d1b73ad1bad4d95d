"""What a user gets from a run: losses, evaluations, weights, output. One launch for each shape."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import early_job
import evaluating_job
from equality_job import Points
from evaluating_job import BATCH_SIZE, EVALUATED_AFTER, HELD_OUT, MICROBATCHES, STEPS
from everstep.execute.data import Dataset, fetch
from everstep.testing.reference import Reference, plain_training
from live import Live, LiveRun, run_live

torch.set_num_threads(1)

SCRIPT = Path(evaluating_job.__file__)
SHAPES = [(1, 1), (2, 2), (1, 3)]

RELATIVE = 1e-5

Found = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    replicas: int
    stages: int
    live: LiveRun
    workers: dict[tuple[int, int], Found]
    """What each worker wrote down, by its replica and stage."""

    @property
    def reporter(self) -> Found:
        (reporter,) = (found for found in self.workers.values() if found["reports"] == {True})
        return reporter


@pytest.fixture(scope="module", params=SHAPES, ids="{0[0]}x{0[1]}".format)
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    replicas, stages = request.param
    folder = tmp_path_factory.mktemp("evaluating")
    events = folder / "events.jsonl"
    live = run_live(SCRIPT, folder, replicas=replicas, stages=stages, events=events)
    assert live.status == 0, live.output
    workers = {
        (joined["replica"], joined["stage"]): read_found(folder / f"{joined['pid']}.pt")
        for joined in live.of("worker_joined")
    }
    return Launch(replicas=replicas, stages=stages, live=live, workers=workers)


def read_found(path: Path) -> Found:
    found: Found = torch.load(path, weights_only=True)
    return found


@cache
def reference(replicas: int, stages: int, *, steps: int = STEPS) -> Reference:
    """Plain training that never evaluates."""
    return plain_training(
        evaluating_job.model,
        torch.nn.functional.cross_entropy,
        evaluating_job.optimizer,
        Points(8),
        batch_size=BATCH_SIZE,
        replicas=replicas,
        microbatches=MICROBATCHES,
        num_stages=stages,
        steps=steps,
        seed=3,
    )


def plain_evaluation(state: dict[str, Tensor], dataset: Dataset) -> dict[str, float]:
    model = evaluating_job.model()
    model.load_state_dict(state)
    model.eval()
    inputs, targets = fetch(dataset, range(len(dataset)))
    with torch.no_grad():
        output = model(inputs)
        loss = torch.nn.functional.cross_entropy(output, targets)
    return {"loss": loss.item(), "accuracy": evaluating_job.accuracy(output, targets).item()}


def test_evaluating_does_not_disturb_training(launch: Launch) -> None:
    expected = reference(launch.replicas, launch.stages)
    assert launch.reporter["losses"] == pytest.approx(expected.losses, rel=RELATIVE)
    assert [event["step"] for event in launch.live.of("step")] == list(range(STEPS))
    assert [event["loss"] for event in launch.live.of("step")] == launch.reporter["losses"]


def test_metrics_of_a_step_are_known_with_its_loss(launch: Launch) -> None:
    assert [event["metrics"] for event in launch.live.of("step")] == launch.reporter["metrics"]
    assert all(0 <= metrics["accuracy"] <= 1 for metrics in launch.reporter["metrics"])
    for (_, stage), found in launch.workers.items():
        is_last = stage == launch.stages - 1
        assert [loss is not None for loss in found["losses"]] == [is_last] * STEPS


def test_an_evaluation_equals_a_plain_one_and_is_the_same_on_all_workers(launch: Launch) -> None:
    for found in launch.workers.values():
        assert found["evaluations"] == launch.reporter["evaluations"]
    num_steps = [*(index + 1 for index in EVALUATED_AFTER), STEPS]
    for steps, evaluations in zip(num_steps, launch.reporter["evaluations"], strict=True):
        state = reference(launch.replicas, launch.stages, steps=steps).state_dict
        for dataset, evaluation in zip(HELD_OUT, evaluations, strict=True):
            assert evaluation == pytest.approx(plain_evaluation(state, dataset), rel=RELATIVE)


def test_the_weights_come_to_the_one_reporter_and_load_into_a_plain_model(launch: Launch) -> None:
    reports = [found["reports"] for found in launch.workers.values()]
    assert sorted(map(sorted, reports)) == [[False]] * (len(reports) - 1) + [[True]]
    for found in launch.workers.values():
        assert bool(found["weights"]) == (found["reports"] == {True})
    plain = evaluating_job.model()
    plain.load_state_dict(launch.reporter["weights"])
    for name, value in reference(launch.replicas, launch.stages).state_dict.items():
        torch.testing.assert_close(plain.state_dict()[name], value, rtol=RELATIVE, atol=1e-6)


def test_output_comes_in_whole_lines_marked_with_the_workers_place(launch: Launch) -> None:
    """Each line was written in two halves."""
    expected = {
        f"[{joined['replica']}:{joined['stage']}] {joined['pid']} has finished step {step}"
        for joined in launch.live.of("worker_joined")
        for step in range(STEPS)
    }
    found = re.findall(r"^.*finished step.*$", launch.live.output, re.MULTILINE)
    assert sorted(found) == sorted(expected)
    assert launch.live.left_behind == []


def test_a_script_alone_trains_as_plain_pytorch_does(tmp_path: Path) -> None:
    """No coordinator, and the file that `everstep run` trains with 1 x 1 in the tests above."""
    with Live([sys.executable, str(SCRIPT), str(tmp_path)]) as live:
        status, output = live.wait()
        assert live.left_behind() == []
    assert status == 0, output
    (path,) = tmp_path.glob("*.pt")
    found = read_found(path)
    expected = reference(1, 1)
    assert found["losses"] == pytest.approx(expected.losses, rel=RELATIVE)
    assert found["reports"] == {True}
    for name, value in expected.state_dict.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=RELATIVE, atol=1e-6)
    for dataset, evaluation in zip(HELD_OUT, found["evaluations"][-1], strict=True):
        plain = plain_evaluation(expected.state_dict, dataset)
        assert evaluation == pytest.approx(plain, rel=RELATIVE)


def test_a_loop_that_all_workers_leave_early_ends_well(tmp_path: Path) -> None:
    """Early stopping is a plain `break`, on every worker at the same step. The workers left
    without a word, the coordinator took them for lost, and the job failed after all its work.
    """
    events = tmp_path / "events.jsonl"
    live = run_live(Path(early_job.__file__), replicas=1, stages=2, events=events)
    assert live.status == 0, live.output
    (finished,) = live.of("finished")
    assert finished["steps"] == early_job.LAST + 1
    assert [event["step"] for event in live.of("step")] == list(range(early_job.LAST + 1))
    assert live.of("worker_lost") == []
    assert live.output.count("4 tensors after the break") == 1
