"""Autosave inside the real transformers Trainer: a run that is cut short goes on bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from everstep.checkpoint.baselines import EverySteps
from everstep.checkpoint.engine import EngineSettings
from everstep.core.errors import ConfigError
from everstep.integrations.transformers import AutosaveCallback


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(8) * (index + 1)) % 30
        return {"input_ids": tokens, "labels": tokens.clone()}


class Stop(Exception):
    """Stands for a crash."""


class StopAt(TrainerCallback):
    def __init__(self, autosave: AutosaveCallback, step: int) -> None:
        self.autosave = autosave
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step:
            self.autosave._get_saver().wait()
            raise Stop


class Recording(Trainer):
    """Notes every batch and its loss."""

    seen: list[tuple[int, list[int], float]]

    def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *rest, **named)
        tokens = inputs["input_ids"].flatten().tolist()
        self.seen.append((self.state.global_step, tokens, loss.item()))
        return loss


def masking(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As for masked language models: which tokens are masked is drawn here."""
    tokens = torch.stack([sample["input_ids"] for sample in samples])
    masked = torch.where(torch.rand(tokens.shape) < 0.2, 31, tokens)
    return {"input_ids": masked, "labels": tokens}


def train(
    directory: Path,
    *,
    stop_at: int | None = None,
    is_resuming: bool = True,
    more: Sequence[TrainerCallback] = (),
    **options: Any,
) -> tuple[Recording, AutosaveCallback]:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    autosave = AutosaveCallback(
        directory, policy=EverySteps(3), engine=EngineSettings(probe_bytes=0)
    )
    callbacks: list[TrainerCallback] = [autosave, *more]
    if stop_at is not None:
        callbacks.append(StopAt(autosave, stop_at))
    trainer = Recording(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory / "out"),
            per_device_train_batch_size=2,
            num_train_epochs=3,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=4,
            **options,
        ),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        data_collator=masking,
        callbacks=callbacks,
    )
    trainer.seen = []
    resume_from = autosave.resume_from() if is_resuming else None
    if stop_at is None:
        trainer.train(resume_from_checkpoint=resume_from)
    else:
        with pytest.raises(Stop):
            trainer.train(resume_from_checkpoint=resume_from)
    return trainer, autosave


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"eval_strategy": "steps", "eval_steps": 3}]
)
@pytest.mark.parametrize("stop_at", [5, 14])
def test_a_training_that_was_cut_short_goes_on_bit_for_bit(
    tmp_path: Path, stop_at: int, options: dict[str, Any]
) -> None:
    whole, _ = train(tmp_path / "whole", **options)
    cut, _ = train(tmp_path / "cut", stop_at=stop_at, **options)
    again, autosave = train(tmp_path / "cut", **options)
    assert [event["event"] for event in autosave.events[:2]] == ["resumed", "failure_seen"]
    first = again.seen[0][0]
    assert first > 0
    assert cut.seen == whole.seen[: len(cut.seen)]
    assert again.seen == [each for each in whole.seen if each[0] >= first]
    ours, theirs = whole.model.state_dict(), again.model.state_dict()  # type: ignore[union-attr]
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_signal_is_noted_while_the_trainer_trains_and_not_after_it_broke(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step == 7:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, more=[Interrupt()])
    again, autosave = train(tmp_path, stop_at=12)
    assert again.seen[0][0] in (7, 8), "it was saved after the step that ran"
    assert "failure_seen" not in [event["event"] for event in autosave.events]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_trainer_that_was_not_told_to_resume_is_told_how(tmp_path: Path) -> None:
    train(tmp_path, stop_at=5)
    with pytest.raises(ConfigError, match="to begin anew"):
        train(tmp_path, is_resuming=False)
