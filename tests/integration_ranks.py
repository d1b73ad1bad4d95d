"""One rank of a training under DistributedDataParallel in somebody else's loop, with Autosave.

A module of its own: forkserver must import it. Ranks meet through a file, so that no port is fixed.
Each tells the losses of its steps, by number, and a digest of its weights.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from autosave_job import QUICK, digest
from everstep.checkpoint.baselines import EverySteps
from everstep.integrations import lightning as for_lightning
from everstep.integrations import transformers as for_transformers

RANKS = 2
WAIT_S = 100.0

Told = tuple[dict[int, float], str]
"""Losses by step; the digest of the weights."""


class Stop(Exception):
    """Stands for a crash."""


def train_ranks(target: Any, folder: Path, *, stop_at: int | None = None) -> list[Told]:
    """What each rank told, of one run of the job."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "integration_ranks"])
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, meeting, folder / "ckpt", stop_at)
        process = context.Process(target=_run_rank, args=(target, *arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        told: list[Told] = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(WAIT_S), f"rank {rank} said nothing for {WAIT_S} s"
            told.append(pipe.recv())
        return told
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join(WAIT_S)
            pipe.close()


def _run_rank(
    target: Any, pipe: Connection, rank: int, meeting: Path, directory: Path, stop_at: int | None
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {
        # As torchrun sets them; the address is not used, the group is there already.
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(3)
    losses, model = target(directory, stop_at)
    pipe.send((losses, digest(dict(model.named_parameters()))))
    pipe.close()
    dist.barrier()


# Lightning.


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(), nn.Linear(12, 1)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.losses[self.trainer.fit_loop.total_batch_idx] = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class StopFit(pl.Callback):
    def __init__(self, autosave: for_lightning.AutosaveCallback, batch: int | None) -> None:
        self.autosave = autosave
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.autosave._get_saver().wait()
            raise Stop


def fit(directory: Path, stop_at: int | None) -> tuple[dict[int, float], nn.Module]:
    inputs = torch.linspace(-1, 1, 240).reshape(40, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = Regression()
    autosave = for_lightning.AutosaveCallback(directory, policy=EverySteps(4), engine=QUICK)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[autosave, StopFit(autosave, stop_at)],
    )
    with suppress(Stop):
        trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    return module.losses, module


# transformers.


class Recording(Trainer):
    losses: dict[int, float]

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **named)
        self.losses[self.state.global_step] = loss.item()
        return loss


class StopTraining(TrainerCallback):
    def __init__(self, autosave: for_transformers.AutosaveCallback, step: int | None) -> None:
        self.autosave = autosave
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step:
            self.autosave._get_saver().wait()
            raise Stop


def train_gpt(directory: Path, stop_at: int | None) -> tuple[dict[int, float], nn.Module]:
    sentences = [(torch.arange(8) * (index + 1)) % 30 for index in range(32)]
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    autosave = for_transformers.AutosaveCallback(directory, policy=EverySteps(3), engine=QUICK)
    trainer = Recording(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory.parent / "out"),
            per_device_train_batch_size=2,
            num_train_epochs=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
        ),
        train_dataset=[{"input_ids": s, "labels": s} for s in sentences],
        callbacks=[autosave, StopTraining(autosave, stop_at)],
    )
    trainer.losses = {}
    with suppress(Stop):
        trainer.train(resume_from_checkpoint=autosave.resume_from())
    return trainer.losses, model
