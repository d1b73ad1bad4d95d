"""The small parts that Autosave is made of, each alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from everstep.checkpoint.curve import LossHistory
from everstep.checkpoint.loss_log import MOST_POINTS, LossLog
from everstep.checkpoint.progress import Progress
from everstep.checkpoint.random_state import (
    capture_random,
    pack_random,
    restore_random,
    unpack_random,
)
from everstep.checkpoint.run_record import RunRecord
from everstep.checkpoint.state import flatten, unflatten
from everstep.checkpoint.subjects import Subjects, hook_updates
from everstep.checkpoint.telemetry import Measured
from everstep.core.clock import ManualClock


def draws() -> list[float]:
    """From every generator, a normal one too: Python and NumPy make those in pairs."""
    return [
        float(torch.rand(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
    ]


@pytest.mark.parametrize("num_drawn", [0, 1, 7])
def test_a_random_state_comes_back_in_the_middle_of_a_pair(num_drawn: int) -> None:
    for _ in range(num_drawn):
        draws()
    state, packed = capture_random(), pack_random()
    expected = draws()
    restore_random(state)
    assert draws() == expected
    unpack_random(packed)
    assert draws() == expected


# Failures.


def test_a_run_that_did_not_say_goodbye_counts_as_a_failure(tmp_path: Path) -> None:
    first = RunRecord(tmp_path, workers=2, is_writer=True)
    assert first.begin() is False
    first.note(100.0)
    second = RunRecord(tmp_path, workers=2, is_writer=True)
    assert second.begin() is True
    assert second.rate.failures == 1
    assert second.rate.worker_seconds == 200.0
    assert second.failures_per_second > first.failures_per_second
    second.end()
    third = RunRecord(tmp_path, workers=2, is_writer=True)
    assert third.begin() is False
    assert third.rate.failures == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"failures": "many", "format": 1}'])
def test_a_record_that_makes_no_sense_is_begun_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "failures.json").write_text(content)
    record = RunRecord(tmp_path, workers=1, is_writer=True)
    assert record.begin() is False
    assert record.rate.failures == 0
    assert json.loads((tmp_path / "failures.json").read_text())["is_running"] is True


def test_only_one_rank_writes_the_record(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, workers=2, is_writer=False)
    record.begin()
    record.end()
    assert list(tmp_path.iterdir()) == []


# Losses.


def test_a_long_history_is_thinned_and_comes_back_after_a_resume() -> None:
    log = LossLog(LossHistory())
    for step in range(5000):
        log.report(step, 1 + 1000 / (step + 10))
    points = log.to_tensor()
    assert MOST_POINTS / 2 <= len(points) <= MOST_POINTS
    history = LossHistory()
    again = LossLog(history)
    again.load(points)
    curve = history.curve()
    assert curve is not None
    assert curve.loss(4000) == pytest.approx(1 + 1000 / 4010, rel=0.05)
    again.report(5000, torch.tensor(1.2))
    assert again.latest == pytest.approx(1.2)


def test_a_loss_that_is_not_a_number_is_not_kept() -> None:
    log = LossLog(LossHistory())
    log.report(0, 2.0)
    log.report(1, float("nan"))
    assert log.to_tensor().tolist() == [[0.0, 2.0]]


# Time.


def test_steps_beside_a_copy_do_not_count_as_plain_steps() -> None:
    clock = ManualClock()
    progress = Progress(now_s=clock.now_s)
    progress.begin()
    for seconds in (9.0, 1.0, 1.0):
        clock.advance(seconds)
        progress.step_done()
    progress.saving(3)
    clock.advance(5.0)
    progress.step_done()
    assert progress.costs(Measured()).step_s == 1.0
    assert progress.seconds == 16.0
    assert progress.saved_at_s == 11.0
    assert progress.unrecorded_seconds() == 16.0
    assert progress.unrecorded_seconds() == 0.0


def test_a_policy_that_takes_long_is_asked_in_a_hundredth_of_the_time() -> None:
    clock = ManualClock()
    progress = Progress(now_s=clock.now_s)
    with progress.asking():
        clock.advance(0.002)
    clock.advance(0.1)
    assert not progress.should_ask()
    clock.advance(0.1)
    assert progress.should_ask()
    with progress.asking():
        clock.advance(0.00001)
    assert progress.should_ask()


# What is saved.


def test_only_what_an_optimizer_updates_stands_still_until_its_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model[0].parameters())
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    subjects = Subjects({"model": model, "optimizer": optimizer})
    shared, own = subjects.capture()
    assert own == {}
    tensors = {f"model/{name}": tensor for name, tensor in shared["model"].items()}
    tensors |= {
        f"optimizer/state/{number}/{name}": tensor
        for number, state in shared["optimizer"]["state"].items()
        for name, tensor in state.items()
    }
    still = subjects.still_names(tensors)
    assert {name for name in still if name.startswith("model/")} == {
        "model/0.weight",
        "model/0.bias",
    }
    assert {name for name in tensors if name.startswith("optimizer/")} <= still


def test_hooks_come_around_the_step_and_go_when_removed() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    seen: list[tuple[str, float]] = []
    remove = hook_updates(
        [optimizer],
        before=lambda: seen.append(("before", parameter.item())),
        after=lambda: seen.append(("after", parameter.item())),
    )
    optimizer.step()
    remove()
    optimizer.step()
    assert seen == [("before", 1.0), ("after", 0.0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.MultiStepLR(o, [3, 5, 5]),
        lambda o: schedulers.OneCycleLR(o, max_lr=1.0, total_steps=10),
        lambda o: schedulers.CyclicLR(o, 0.1, 1.0),
        schedulers.ReduceLROnPlateau,
        lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 5)], [3]
        ),
    ],
)
def test_the_states_of_torchs_schedulers_come_back(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    state = make(optimizer).state_dict()
    assert unflatten(flatten(state)) == state


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    model = nn.Linear(2, 2)
    subjects = Subjects({"model": torch.compile(model, backend="eager")})
    assert set(subjects.capture()[0]["model"]) == {"weight", "bias"}
