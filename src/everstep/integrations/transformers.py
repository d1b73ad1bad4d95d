"""Autosave in the transformers Trainer.

    autosave = AutosaveCallback("ckpt")
    trainer = Trainer(..., callbacks=[autosave])
    trainer.train(resume_from_checkpoint=autosave.resume_from())

The Trainer finds its place in the data by itself when it is told to resume; `resume_from` makes the
directory it wants, with the weights and its own state. The rest comes from the checkpoint: the
optimizer, the scheduler, and the random states as they were when each batch was asked for, so that
random collators (masked language models) give the same batches again. Randomness inside the
workers of a DataLoader is not kept: with `dataloader_num_workers=0` it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors.torch import save_file
from torch.utils.data import DataLoader

from everstep.checkpoint.engine import EngineSettings
from everstep.checkpoint.policy import Policy
from everstep.checkpoint.random_state import RandomState, capture_random, restore_random
from everstep.checkpoint.rank_state import read_for_rank
from everstep.checkpoint.restore import newest, wait_writers
from everstep.checkpoint.retention import Retention
from everstep.checkpoint.run_record import local_directory
from everstep.checkpoint.saver import Saver, SaverSettings
from everstep.core.errors import ConfigError, MissingExtra

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.utils import SAFE_WEIGHTS_NAME
except ImportError as error:
    raise MissingExtra(
        "transformers", extra="transformers", needed_for="AutosaveCallback"
    ) from error


class AutosaveCallback(TrainerCallback):
    def __init__(
        self,
        directory: str | Path,
        *,
        policy: Policy | None = None,
        keep: Retention | None = None,
        engine: EngineSettings | None = None,
    ) -> None:
        self._settings = SaverSettings(directory=directory, policy=policy, keep=keep, engine=engine)
        self._saver: Saver | None = None
        self._extras: dict[str, Any] | None = None
        self._order: _AskedOrder | None = None

    @property
    def events(self) -> Sequence[Mapping[str, object]]:
        """As of `everstep.Autosave`."""
        return () if self._saver is None else tuple(self._saver.events)

    def resume_from(self) -> str | None:
        """What `Trainer.train(resume_from_checkpoint=...)` wants; None when there is nothing."""
        directory = self._settings.directory
        wait_writers(directory, timeout_s=self._settings.writer_wait_s)
        found = newest(directory)
        if found is None:
            return None
        target = local_directory(directory) / f".trainer-{found.path.name}"
        if not target.exists():
            state = read_for_rank(found, rank=0, size=len(found.manifest.parts))
            _write_for_trainer(target, state.shared["model"], state.extras["loop"]["trainer"])
        return str(target)

    # The Trainer calls these in this order.

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if self._saver is not None:  # Of a training that ended by an exception.
            self._saver.close()
        is_replicated = args.world_size > 1
        self._saver = Saver(
            _things(kwargs), self._settings, replicated=["model"] if is_replicated else []
        )
        self._extras = self._saver.resume()
        self._check_same_step(state)
        self._order = _watch(kwargs["train_dataloader"])
        if self._extras is not None and self._order is not None:
            self._order.load(self._extras["order"], given=_batches_taken(args, state, self._order))
        length = None if self._order is None else len(self._order)
        self._saver.begin(
            total_steps=state.max_steps, loader_length=length, is_in_loop=_is_training
        )

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        extras, self._extras = self._extras, None
        # With workers no batch is made here; without, the order has restored what was drawn from.
        if extras is not None and (self._order is None or args.dataloader_num_workers > 0):
            restore_random(extras["random"])

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        # An evaluation that follows is not run again on resuming, and the end of a pass neither.
        is_quiet = not control.should_evaluate and not _is_end_of_pass(state)
        self._get_saver().step_done(self._capture(state), can_save=is_quiet)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        # The Trainer shows losses to nobody but its logs.
        if self._saver is not None and isinstance(loss := (logs or {}).get("loss"), float):
            self._saver.report(loss)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        saver = self._get_saver()
        saver.save_and_wait(self._capture(state))
        saver.end()
        saver.close()

    def _capture(self, state: TrainerState) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "random": capture_random(),
            "trainer": json.dumps(dataclasses.asdict(state)),
            "order": None if self._order is None else self._order.kept(),
        }

    def _check_same_step(self, state: TrainerState) -> None:
        saver = self._get_saver()
        if saver.step != state.global_step:
            raise ConfigError(
                "Trainer",
                f"at step {state.global_step}, and {self._settings.directory} at {saver.step}",
                "call trainer.train(resume_from_checkpoint=autosave.resume_from()),"
                " or give another directory to begin anew",
            )

    def _get_saver(self) -> Saver:
        assert self._saver is not None, "on_train_begin comes first"
        return self._saver


class _AskedOrder:
    """A batch sampler that notes the random state as each batch is asked for, and restores it.

    accelerate asks for one batch more than is trained on, so the batches from the next one on may
    have been made already, from states that are in the past when a checkpoint is taken.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._began_with: RandomState = {}
        self._asked: list[RandomState] = []
        self._first = 0
        """The number of the batch of the first state in `_asked`."""

        self._again: dict[str, Any] | None = None
        self._given = 0

    def load(self, kept: dict[str, Any], *, given: int) -> None:
        """The next pass is one of which `given` batches were trained on."""
        self._again, self._given = kept, given

    def kept(self) -> dict[str, Any]:
        return {
            "began_with": self._began_with,
            "first": self._first,
            "asked": list(self._asked),
            "now": capture_random(),
        }

    def __iter__(self) -> Iterator[Any]:
        again, self._again = self._again, None
        if again is not None:
            restore_random(again["began_with"])
        self._began_with = capture_random()
        self._asked, self._first = [], 0
        batches = iter(self._sampler)
        number = 0
        while True:
            if again is not None and number >= self._given:
                again = self._recall(again, number)
            self._note(number)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            number += 1

    def _recall(self, again: dict[str, Any], number: int) -> dict[str, Any] | None:
        """Restores the state for this batch; None when it was the last one to restore."""
        asked: list[RandomState] = again["asked"]
        index = number - again["first"]
        is_past = index < len(asked)
        restore_random(asked[index] if is_past else again["now"])
        return again if is_past else None

    def _note(self, number: int) -> None:
        self._asked.append(capture_random())
        if len(self._asked) > _ASKED_AHEAD:
            del self._asked[0]
        self._first = number + 1 - len(self._asked)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


_ASKED_AHEAD = 8
"""Batches that may have been asked for and not trained on; accelerate's one is enough."""


def _things(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    named = {
        "model": kwargs["model"],
        "optimizer": kwargs["optimizer"],
        "scheduler": kwargs["lr_scheduler"],
        "scaler": getattr(kwargs["optimizer"], "scaler", None),
    }
    return {name: thing for name, thing in named.items() if thing is not None}


def _watch(loader: Any) -> _AskedOrder | None:
    """Puts the watched order into the Trainer's loader; None where there is no order to watch."""
    inner = getattr(loader, "base_dataloader", loader)
    if not isinstance(inner, DataLoader) or inner.batch_sampler is None or inner.num_workers > 0:
        return None
    order = _AskedOrder(inner.batch_sampler)
    inner.__dict__["batch_sampler"] = order
    return order


def _batches_taken(args: TrainingArguments, state: TrainerState, order: _AskedOrder) -> int:
    per_pass = -(-len(order) // args.gradient_accumulation_steps)
    return (state.global_step % per_pass) * args.gradient_accumulation_steps


def _is_training(frame: FrameType | None) -> bool:
    """The Trainer tells its callbacks nothing when an exception ends it."""
    while frame is not None:
        if frame.f_code.co_name == "_inner_training_loop":
            return True
        frame = frame.f_back
    return False


def _is_end_of_pass(state: TrainerState) -> bool:
    return state.epoch is not None and abs(state.epoch - round(state.epoch)) < 1e-9


def _write_for_trainer(target: Path, weights: Mapping[str, Any], state: str) -> None:
    for older in target.parent.glob(".trainer-*"):
        if not older.name.startswith(target.name):  # that is another rank's, of this step
            shutil.rmtree(older, ignore_errors=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    save_file(dict(weights), beside / SAFE_WEIGHTS_NAME)
    (beside / TRAINER_STATE_NAME).write_text(state, encoding="utf-8")
    try:
        beside.rename(target)
    except OSError:  # Another rank was first; its directory holds the same.
        shutil.rmtree(beside, ignore_errors=True)
