"""Autosave inside the real Lightning: a run that is cut short goes on bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from everstep.checkpoint.baselines import EverySteps
from everstep.checkpoint.engine import EngineSettings
from everstep.integrations.lightning import AutosaveCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(), nn.Linear(12, 1)
        )
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.seen.append((self.trainer.fit_loop.total_batch_idx, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Stop(Exception):
    """Stands for a crash."""


class StopAt(pl.Callback):
    def __init__(self, autosave: AutosaveCallback, batch: int) -> None:
        self.autosave = autosave
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.autosave._get_saver().wait()
            raise Stop


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples without a length: Lightning then reads ahead."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data
        self.at = self.begin_at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin_at = self.begin_at, 0
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["at"]


def fit(
    directory: Path, *, stop_at: int | None = None, is_stream: bool = False, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(3)
    inputs = torch.randn(44, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    train: DataLoader[Any] = DataLoader(data, batch_size=4, shuffle=True)
    if is_stream:
        train = DataLoader(Stream(data), batch_size=4)
    validation = DataLoader(data, batch_size=11)
    module = Regression()
    autosave = AutosaveCallback(
        directory, policy=EverySteps(4), engine=EngineSettings(probe_bytes=0)
    )
    callbacks: list[Any] = [autosave]
    if stop_at is not None:
        callbacks.append(StopAt(autosave, stop_at))
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    if stop_at is None:
        trainer.fit(module, train, validation)
    else:
        with pytest.raises(Stop):
            trainer.fit(module, train, validation)
    return module, autosave


QUIET = [
    "ignore:.*does not have many workers.*",
    "ignore:.*num_workers.*",
    "ignore:.*LeafSpec.*",
]


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 4}, {"is_stream": True}]
)
@pytest.mark.parametrize("stop_at", [7, 18])
def test_a_fit_that_was_cut_short_goes_on_bit_for_bit(
    tmp_path: Path, stop_at: int, options: dict[str, Any]
) -> None:
    whole, _ = fit(tmp_path / "whole", **options)
    cut, _ = fit(tmp_path / "cut", stop_at=stop_at, **options)
    again, autosave = fit(tmp_path / "cut", **options)
    assert [event["event"] for event in autosave.events[:2]] == ["resumed", "failure_seen"]
    assert again.seen[0][0] > 0
    assert cut.seen == whole.seen[: len(cut.seen)]
    assert again.seen == whole.seen[again.seen[0][0] :]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.filterwarnings(*QUIET)
def test_a_fit_that_is_over_is_not_run_again(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path)
    again, _ = fit(tmp_path)
    assert again.seen == []
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
