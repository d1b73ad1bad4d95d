"""Trouble around Autosave: it is said clearly, and stops training only when it must."""

from __future__ import annotations

import copy
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import everstep
from autosave_job import QUICK
from everstep.checkpoint.baselines import EverySteps
from everstep.core.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    ConfigError,
    StateNotSavable,
)


def model_of(width: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Dropout(), nn.Linear(width, 1))


def data() -> DataLoader[Any]:
    inputs = torch.linspace(0, 1, 60).reshape(20, 3)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)


def train(
    directory: str | Path,
    *,
    total: int = 12,
    model: nn.Module | None = None,
    stop_after: int | None = None,
    at_first_step: Callable[[everstep.Autosave], None] = lambda _: None,
    **things: Any,
) -> everstep.Autosave:
    model = model or model_of()
    optimizer = things.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = data()
    saver = everstep.Autosave(
        model=model,
        optimizer=optimizer,
        directory=directory,
        policy=EverySteps(4),
        engine=QUICK,
        **things,
    )
    for step, (inputs, targets) in saver.steps(loader, total=total):
        if step == stop_after:
            break
        if step == (saver.resumed_from or 0):
            at_first_step(saver)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        saver.report(loss)
    return saver


def events(saver: everstep.Autosave, name: str) -> list[Any]:
    return [event for event in saver.events if event["event"] == name]


# Saving.


def test_a_directory_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"

    def put_a_file_there(_: everstep.Autosave) -> None:
        shutil.rmtree(directory)
        directory.touch()

    saver = train(directory, at_first_step=put_a_file_there)
    assert saver.step == 12
    assert events(saver, "checkpoint") == []
    assert {event["step"] for event in events(saver, "checkpoint_failed")} >= {4, 8, 12}


def test_a_full_disk_does_not_stop_training_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    def fill_up(saver: everstep.Autosave) -> None:
        """The writer can write no file longer than that."""
        pid = saver._saver._started_engine().writer_pid
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, 20_000))

    train(tmp_path, total=4, model=model_of(4000))
    saver = train(tmp_path, model=model_of(4000), at_first_step=fill_up)
    assert saver.step == 12
    assert {event["step"] for event in events(saver, "checkpoint_failed")} >= {8, 12}
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000004"]
    assert train(tmp_path, model=model_of(4000)).resumed_from == 4


class Fickle:
    """A thing whose state cannot always be had."""

    def __init__(self) -> None:
        self.num_asked = 0

    def state_dict(self) -> dict[str, int]:
        self.num_asked += 1
        if self.num_asked in (2, 3):  # when memory is made ready, and at the first checkpoint
            raise RuntimeError("not now")
        return {"asked": self.num_asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_asked = state["asked"]


def test_a_thing_that_raises_when_saved_costs_that_checkpoint_only(tmp_path: Path) -> None:
    saver = train(tmp_path, fickle=Fickle())
    assert [event["step"] for event in events(saver, "checkpoint_failed")] == [4]
    assert "RuntimeError: not now" in events(saver, "checkpoint_failed")[0]["why"]
    assert [event["step"] for event in events(saver, "checkpoint")] == [8, 12]


def test_the_memory_made_after_the_first_step_is_what_checkpoints_go_through(
    tmp_path: Path,
) -> None:
    """It was made before that step, when an optimizer has no state yet: too small for any
    checkpoint, so that the first one had to make it anew."""
    model = model_of(200_000)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = everstep.Autosave(
        model=model, optimizer=optimizer, directory=tmp_path, policy=EverySteps(2), engine=QUICK
    )
    slots = []
    for _, (inputs, _) in saver.steps(data(), total=4):
        slots.append(dict(saver._saver._started_engine()._arena._slots))
        model(inputs).sum().backward()
        optimizer.step()
    assert slots[0] == {}
    assert slots[1][0].size_bytes > 3 * 4 * 200_000
    assert slots[3][0] is slots[1][0]


def test_what_can_never_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    class Odd(Fickle):
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

    with pytest.raises(StateNotSavable, match="odd/function"):
        train(tmp_path, odd=Odd())


# Restoring.


def test_a_directory_that_cannot_be_looked_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match="whether it holds checkpoints cannot be seen: Not a dir"):
        train(tmp_path / "a file" / "ckpt")


def test_another_model_is_refused_and_every_difference_is_named(tmp_path: Path) -> None:
    train(tmp_path)
    other = model_of(7)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointMismatch) as refused:
        train(tmp_path, model=other)
    message = str(refused.value)
    assert "model's '0.weight' is [7, 3], in the checkpoint [5, 3]" in message
    assert "another directory to begin anew" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_other_names_kinds_and_things_are_refused(tmp_path: Path) -> None:
    train(tmp_path)
    longer = nn.Sequential(*model_of().children(), nn.Linear(1, 1))
    with pytest.raises(CheckpointMismatch, match=r"model has '3.bias', the checkpoint has not"):
        train(tmp_path, model=longer)
    model = model_of()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointMismatch, match="'optimizer' is a Adam, in the checkpoint a SGD"):
        train(tmp_path, model=model, optimizer=adam)
    with pytest.raises(CheckpointMismatch, match="'ema' was given and is not in the checkpoint"):
        train(tmp_path, ema=model_of())
    first, *others = model.parameters()
    grouped = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"groups of \[1, 3\] parameters"):
        train(tmp_path, model=model, optimizer=grouped)


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", total=16)
    assert whole.step == 16
    train(tmp_path / "damaged")
    flip_a_bit(tmp_path / "damaged" / "step-000000012")
    saver = train(tmp_path / "damaged", total=16)
    assert saver.resumed_from == 8
    (resumed,) = events(saver, "resumed")
    assert [Path(each["path"]).name for each in resumed["passed_over"]] == ["step-000000012"]


def test_when_no_checkpoint_is_good_the_user_decides(tmp_path: Path) -> None:
    train(tmp_path)
    for path in tmp_path.glob("step-*"):
        flip_a_bit(path)
    with pytest.raises(CheckpointCorrupt, match="none of its 2 checkpoints verifies"):
        train(tmp_path)


def flip_a_bit(checkpoint: Path) -> None:
    (shard,) = checkpoint.glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


# Using it.


def test_anything_with_a_state_is_kept_under_its_name(tmp_path: Path) -> None:
    model = model_of()
    ema = torch.optim.swa_utils.AveragedModel(model)
    train(tmp_path, model=model, ema=ema, total=6)
    ema.update_parameters(model)
    later = torch.optim.swa_utils.AveragedModel(model_of())
    saver = train(tmp_path, ema=later, total=6)
    assert saver.resumed_from == 6
    assert int(later.n_averaged) == 0, "as when it was saved"


def test_leaving_the_loop_early_keeps_what_is_durable(tmp_path: Path) -> None:
    train(tmp_path, stop_after=6)
    assert train(tmp_path).resumed_from == 4


def test_a_finished_job_has_nothing_left_to_do(tmp_path: Path) -> None:
    train(tmp_path)
    saver = train(tmp_path)
    assert saver.resumed_from == saver.step == 12
    assert events(saver, "checkpoint") == []
    assert train(tmp_path, total=14).step == 14


def test_a_job_goes_on_from_a_store_behind_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"file://{tmp_path}/store"
    train(url, stop_after=6)
    saver = train(url)
    assert saver.resumed_from == 4
    assert [event["event"] for event in saver.events][:2] == ["resumed", "failure_seen"]
    assert {path.name for path in (tmp_path / "store").iterdir()} == {
        "step-000000008",
        "step-000000012",
    }


def test_a_checkpoint_is_readable_by_stock_tools(tmp_path: Path) -> None:
    from safetensors import safe_open

    model = model_of()
    train(tmp_path, model=model)
    (shard,) = (tmp_path / "step-000000012").glob("shard-*")
    with safe_open(shard, framework="pt") as file:
        weight: Tensor = file.get_tensor("model/0.weight")
    assert torch.equal(weight, model.state_dict()["0.weight"])


def test_wrong_use_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give at least model="):
        everstep.Autosave(directory=tmp_path)
    with pytest.raises(ConfigError, match=r"Autosave.model is a int: it has no state_dict\(\)"):
        everstep.Autosave(model=3, directory=tmp_path)
    saver = everstep.Autosave(model=model_of(), directory=tmp_path, engine=QUICK)
    with pytest.raises(ConfigError, match="give a loader here or to Autosave"):
        saver.steps(total=3)
    with pytest.raises(ConfigError, match="a whole pass over it gave no batch"):
        list(saver.steps([], total=3))
    with pytest.raises(ConfigError, match="make another Autosave for another loop"):
        saver.steps([1], total=3)
