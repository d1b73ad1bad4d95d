"""Autosave in Lightning: with `Trainer(callbacks=[AutosaveCallback("ckpt")])` `fit` just goes on.

Keeps the module, optimizers, schedulers, the precision plugin, the loops, the other callbacks and
the place in the training data. Saves at the end of a batch, but not of one after which a pass ends
or validation runs: what these do would be missing. State that the module's own
`on_train_batch_end` changes comes one batch late, as in Lightning's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.batches import Batches
from everstep.checkpoint.engine import EngineSettings
from everstep.checkpoint.policy import Policy
from everstep.checkpoint.random_state import capture_random, restore_random
from everstep.checkpoint.retention import Retention
from everstep.checkpoint.saver import Saver, SaverSettings
from everstep.core.errors import MissingExtra

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtra("lightning", extra="lightning", needed_for="AutosaveCallback") from error


class AutosaveCallback(Callback):
    """Give it last, so that what other callbacks do at the end of a batch is in the checkpoint."""

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
        self._loaders: list[Batches] = []

    @property
    def events(self) -> Sequence[Mapping[str, object]]:
        """As of `everstep.Autosave`."""
        return () if self._saver is None else tuple(self._saver.events)

    # Lightning calls these in this order.

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saver = Saver(_things(trainer, pl_module), self._settings)
        self._extras = self._saver.resume()
        if self._extras is not None:
            trainer.fit_loop.load_state_dict(self._extras["loops"])
            _load_callbacks(trainer, self._extras["callbacks"], without=self)
        self._wrap_loaders(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        # Here and not before: Lightning's own signal handlers are in place, and come after ours.
        self._get_saver().begin(
            total_steps=_total_batches(trainer),
            loader_length=_finite(trainer.num_training_batches),
            is_told_of_updates=True,
        )

    def on_before_optimizer_step(self, *_: Any) -> None:
        # After backward. The optimizer's own hook would come before forward: Lightning runs both
        # inside the optimizer's step.
        self._get_saver().before_update()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._get_saver().report(loss)
        self._get_saver().step_done(self._capture(trainer), can_save=_is_quiet(trainer, batch_idx))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._get_saver().save_and_wait(self._capture(trainer))
        self._get_saver().end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        if self._saver is not None:
            for loader in self._loaders:
                loader.close()
            self._saver.close()

    def on_exception(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    # What is kept of the loop.

    def _capture(self, trainer: Trainer) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "random": capture_random(),
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {
                each.state_key: state
                for each in trainer.callbacks  # type: ignore[attr-defined]
                if each is not self and (state := each.state_dict())
            },
        }

    def _wrap_loaders(self, trainer: Trainer) -> None:
        """Lightning asks the strategy to prepare each loader, and itself keeps the place of those
        that have a `state_dict`."""
        prepare = trainer.strategy.process_dataloader

        def prepare_and_wrap(loader: Any) -> Any:
            loader = prepare(loader)
            if not trainer.training:
                return loader
            batches = Batches(
                loader,
                when_found=self._restore_random,
                # Lightning must look ahead to know which batch is the last one.
                is_read_ahead=Batches(loader).length is None,
            )
            self._loaders.append(batches)
            return batches

        trainer.strategy.process_dataloader = prepare_and_wrap  # type: ignore[method-assign, assignment]

    def _restore_random(self) -> None:
        assert self._extras is not None, "a place is found only where one was kept"
        restore_random(self._extras["random"])

    def _get_saver(self) -> Saver:
        assert self._saver is not None, "on_fit_start comes first"
        return self._saver


def _things(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    wrapped = trainer.strategy.model
    model = wrapped if isinstance(wrapped, DistributedDataParallel) else module
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        "model": model,
        **_numbered("optimizer", trainer.optimizers),
        **_numbered("scheduler", schedulers),
        "precision": trainer.precision_plugin,
    }


def _numbered(name: str, things: Sequence[Any]) -> dict[str, Any]:
    if len(things) == 1:
        return {name: things[0]}
    return {f"{name}_{number}": thing for number, thing in enumerate(things)}


def _load_callbacks(trainer: Trainer, states: Mapping[str, Any], *, without: Callback) -> None:
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if each is not without and each.state_key in states:
            each.load_state_dict(states[each.state_key])


def _is_quiet(trainer: Trainer, batch_idx: int) -> bool:
    """Whether nothing but the next batch comes after this one."""
    if trainer.is_last_batch:
        return False
    every = trainer.val_check_batch
    if not trainer.enable_validation or every is None or every <= 1:
        return True
    is_over_passes = trainer.check_val_every_n_epoch is None
    number = trainer.fit_loop.total_batch_idx if is_over_passes else batch_idx
    return (number + 1) % every != 0


def _total_batches(trainer: Trainer) -> int | None:
    if trainer.max_steps > 0:
        return int(trainer.max_steps) * int(trainer.accumulate_grad_batches)
    batches = _finite(trainer.num_training_batches)
    if batches is None or not trainer.max_epochs or trainer.max_epochs < 0:
        return None
    return batches * trainer.max_epochs


def _finite(number: float) -> int | None:
    return None if number == float("inf") else int(number)
