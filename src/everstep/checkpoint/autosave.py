"""`everstep.Autosave`: a plain training loop that survives being killed, in three lines.

Joins the data, the random states and the signals of a loop to a `Saver`, which does the saving.
Invariant: a run that was killed and came back gives bit for bit what it would have given.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from everstep.checkpoint.batches import Batches
from everstep.checkpoint.engine import EngineSettings
from everstep.checkpoint.policy import Policy
from everstep.checkpoint.random_state import capture_random, restore_random
from everstep.checkpoint.retention import Retention
from everstep.checkpoint.saver import Saver, SaverSettings
from everstep.core.errors import ConfigError

Batch = TypeVar("Batch")


class Autosave:
    """Makes checkpoints of a training loop where they pay, and goes on from the newest one.

        saver = everstep.Autosave(model=model, optimizer=optimizer, loader=loader, directory="ckpt")
        for step, batch in saver.steps(loader, total=100_000):
            ...
            optimizer.step()
            saver.report(loss)

    Anything with `state_dict` and `load_state_dict` can be given by keyword. The state is restored
    when the object is made; the place in the data and the random states when `steps` begins.
    Under DistributedDataParallel every rank makes one, after the model was wrapped.
    """

    def __init__(
        self,
        *,
        directory: str | Path,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Iterable[Any] | None = None,
        policy: Policy | None = None,
        keep: Retention | None = None,
        engine: EngineSettings | None = None,
        **more: Any,
    ) -> None:
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        things = {name: thing for name, thing in named.items() if thing is not None} | more
        settings = SaverSettings(directory=directory, policy=policy, keep=keep, engine=engine)
        self._loader = loader
        self._saver = Saver(things, settings)
        self._extras = self._saver.resume()
        self.resumed_from: int | None = None if self._extras is None else self._saver.step
        """The step that training goes on after; None when it begins."""

        self._is_used = False

    @property
    def step(self) -> int:
        """Steps finished, in this run and those before it."""
        return self._saver.step

    @property
    def events(self) -> Sequence[Mapping[str, object]]:
        """What happened, oldest first: `resumed`, `checkpoint`, `checkpoint_failed`, `signal`,
        `failure_seen`; each with `event`, `time` and its facts. The last 1000."""
        return tuple(self._saver.events)

    def steps(
        self, loader: Iterable[Batch] | None = None, *, total: int
    ) -> Iterator[tuple[int, Batch]]:
        """The number of each step from where training stands up to `total`, and its batch.

        Passes over the loader follow each other. Once per object.
        """
        if total < 0:
            raise ConfigError("steps.total", total, "it must not be negative")
        if self._is_used:
            raise ConfigError("steps", "called again", "make another Autosave for another loop")
        source = self._loader if loader is None else loader
        if source is None:
            raise ConfigError("steps.loader", None, "give a loader here or to Autosave")
        self._is_used = True
        return self._steps(cast(Iterable[Batch], source), total)

    def report(self, loss: float | Tensor) -> None:
        """The loss of the step under way. A tensor on a device is read one step late."""
        self._saver.report(loss)

    def _steps(self, loader: Iterable[Batch], total: int) -> Iterator[tuple[int, Batch]]:
        batches = Batches(loader, when_found=self._restore_random)
        if self._extras is not None:
            batches.load_state_dict(self._extras["data"])

        def extras() -> dict[str, Any]:
            return {"random": capture_random(), "data": batches.state_dict()}

        saver = self._saver
        saver.begin(total_steps=total, loader_length=batches.length)
        stream = _endless(batches)
        try:
            while saver.step < total:
                yield saver.step, next(stream)
                saver.step_done(extras)
            if self.step != self.resumed_from:
                saver.save_and_wait(extras)
            saver.end()
        finally:
            stream.close()
            batches.close()
            saver.close()

    def _restore_random(self) -> None:
        assert self._extras is not None, "a place is found only where one was kept"
        restore_random(self._extras["random"])


def _endless(batches: Batches) -> Generator[Any, None, None]:
    """Pass after pass. Ends with an error when a whole pass gives nothing."""
    while True:
        num_batches = 0
        is_rest = batches.is_in_pass
        for batch in batches:
            num_batches += 1
            yield batch
        if num_batches == 0 and not is_rest:
            raise ConfigError("steps.loader", "empty", "a whole pass over it gave no batch")
