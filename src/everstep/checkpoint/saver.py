"""Saves at step boundaries when it pays, and comes back: what every kind of training loop needs.

    resume()                 the newest good checkpoint goes into the things; its extras come back
    begin()                  hooks, signals, the record of failures
    step_done(extras)        after every step: the policy is asked, and a copy begins or not
    end()

`extras` is what the loop itself must keep, asked for only when a checkpoint is taken: its place in
the data, random states. It is kept per rank. Trouble with saving is an event, never an exception.
Invariant: all ranks save after the same steps, and only after an optimizer's update, when no
gradients are left over that the checkpoint would lack.
"""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from everstep.checkpoint.agreement import Wish, find_agreement
from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.finding import find_agreed
from everstep.checkpoint.judgement import Judgement
from everstep.checkpoint.layout import Layout, Part
from everstep.checkpoint.policy import Policy
from everstep.checkpoint.rank_state import Tree, capture, read_for_rank
from everstep.checkpoint.restore import Found
from everstep.checkpoint.retention import KeepLast, Retention
from everstep.checkpoint.signals import Signals
from everstep.checkpoint.state import FlatState
from everstep.checkpoint.subjects import Subjects, hook_updates
from everstep.core.errors import WaitTimedOut

_logger = logging.getLogger("everstep.checkpoint")

EVENTS_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverSettings:
    directory: str | Path
    """A local one, or any fsspec URL."""

    policy: Policy | None = None
    """When to save. Default: where losing work would hurt most, in 3.5 % of the time at most."""

    keep: Retention | None = None
    """Which checkpoints stay. Default: the last two."""

    engine: EngineSettings | None = None

    last_save_s: float = 600.0
    """How long the last save, at the end or after a signal, may take to reach the disk."""

    writer_wait_s: float = 60.0
    """How long a start waits for the writer of a trainer that was killed."""


class Saver:
    """One per rank; all ranks make theirs, and call it, at the same moments."""

    def __init__(
        self,
        things: Mapping[str, Any],
        settings: SaverSettings,
        *,
        replicated: Collection[str] = (),
    ) -> None:
        """`replicated`: modules that are alike on all ranks without being wrapped to say so."""
        self.step = 0
        """Steps finished, over all runs of the job."""

        self.events: deque[Mapping[str, object]] = deque(maxlen=EVENTS_KEPT)
        self._settings = settings
        self._agreement = find_agreement()
        self._subjects = Subjects(
            things,
            rank=self._agreement.rank,
            num_ranks=self._agreement.size,
            replicated=replicated,
        )
        # What cannot be saved is said before training, not at the first checkpoint.
        capture(self._subjects, {}, rank=self.rank, size=self._agreement.size)
        self._judgement = Judgement(
            settings.policy,
            directory=settings.directory,
            workers=self._agreement.size,
            is_recorder=self._agreement.rank == 0,
        )
        self._signals = Signals()
        self._engine: Engine | None = None
        self._remove_hooks: Callable[[], None] = lambda: None
        self._has_updated = False
        self._is_prepared = False
        self._is_asked_for = False
        self._is_owed = False
        self._leaving: int | None = None
        self._under_way: set[int] = set()
        """Steps whose checkpoints have been begun and have not ended yet."""

        self._num_slots = (settings.engine or EngineSettings()).num_slots
        self._total_steps: int | None = None
        self._loader_length: int | None = None

    @property
    def rank(self) -> int:
        return self._agreement.rank

    # Coming back.

    def resume(self) -> Tree | None:
        """Puts the newest good checkpoint into the things. The extras that were saved with it, or
        None when there is no checkpoint. Raises CheckpointMismatch and CheckpointCorrupt."""
        began_s = time.monotonic()
        found = find_agreed(
            self._settings.directory, self._agreement, wait_s=self._settings.writer_wait_s
        )
        if found is None:
            return None
        state = read_for_rank(found, rank=self.rank, size=self._agreement.size)
        self._subjects.restore(state.shared, state.own, kinds=state.kinds, source=str(found.path))
        self.step = found.step
        took_s = time.monotonic() - began_s
        self._judgement.resumed(state.extras["saver"], step=self.step, took_s=took_s)
        self._tell_resumed(found, took_s)
        extras: Tree = state.extras["loop"]
        return extras

    def _tell_resumed(self, found: Found, took_s: float) -> None:
        passed_over = [{"path": str(each.path), "why": each.why} for each in found.passed_over]
        _logger.info("goes on after step %d, from %s", self.step, found.path)
        self._tell(
            "resumed",
            step=self.step,
            path=str(found.path),
            seconds=took_s,
            passed_over=passed_over,
        )

    # Training.

    def begin(
        self,
        *,
        total_steps: int | None = None,
        loader_length: int | None = None,
        is_told_of_updates: bool = False,
        is_in_loop: Callable[[FrameType | None], bool] = lambda _: True,
    ) -> None:
        """`is_told_of_updates`: the loop itself calls `before_update`. For loops whose optimizers
        run forward and backward inside their step, where a hook on it would come too early.
        `is_in_loop`: see `Signals`."""
        self._total_steps = total_steps
        self._loader_length = loader_length
        record = self._judgement.record
        if record.begin():
            self._tell("failure_seen", failures=record.rate.failures)
        run = f"{self._agreement.share(uuid.uuid4().int >> 80):012x}"
        self._engine = Engine(
            self._settings.directory,
            part=Part(self.rank, self._agreement.size, run),
            settings=self._settings.engine,
            keep=self._settings.keep or KeepLast(2),
        )
        self._remove_hooks = hook_updates(
            self._subjects.optimizers,
            before=None if is_told_of_updates else self.before_update,
            after=self._note_update,
        )
        self._engine.start_writer()
        self._signals.start(is_in_loop)
        self._judgement.progress.begin()

    def before_update(self) -> None:
        """Returns when a copy that is under way no longer needs the parameters."""
        self._started_engine().before_update()

    def report(self, loss: float | Tensor) -> None:
        """The loss of the step that is under way. Rank 0 decides, so its loss is enough."""
        if self.rank == 0:
            self._judgement.losses.report(self.step, loss)

    def step_done(self, extras: Callable[[], Tree], *, can_save: bool = True) -> None:
        """After every step. Returns at once, or when the signal that came has been dealt with.

        What is due while it cannot be saved is saved as soon as it can be.
        """
        self.step += 1
        # Without an optimizer to hook, nothing else tells the engine that a step has gone by.
        self.before_update()
        self._judgement.progress.step_done()
        self._take_events()
        agreed = self._agreement.agree(self._wish)
        self._is_owed |= agreed.should_save
        self._leaving = self._leaving or agreed.signal
        is_whole, self._has_updated = self._has_updated or not self._subjects.optimizers, False
        if is_whole and not self._is_prepared:
            self._prepare(extras)
        if not is_whole or not can_save:
            return
        if self._leaving is not None:
            self._leave(self._leaving, extras)
        elif self._is_owed:
            self.save(extras)

    def _prepare(self, extras: Callable[[], Tree]) -> None:
        """After the first update: before it, optimizers have not made their state."""
        self._is_prepared = True
        try:
            state, layout = self._capture(extras)
        except Exception as error:  # noqa: BLE001 what cannot be saved must not stop training
            _logger.warning("checkpoints could not be prepared for, and may fail: %s", error)
        else:
            self._started_engine().prepare(state, layout=layout)

    def save(self, extras: Callable[[], Tree]) -> None:
        """Starts a checkpoint of the step just finished."""
        self._is_owed = self._is_asked_for = False
        self._judgement.progress.saving(self.step)
        try:
            self._judgement.losses.read()
            state, layout = self._capture(extras)
            has_begun = self._started_engine().save(
                self.step,
                state,
                about={"loss": self._judgement.losses.latest, "step": self.step},
                layout=layout,
            )
        except Exception as error:  # noqa: BLE001 what cannot be saved must not stop training
            why = f"{type(error).__name__}: {error}"
            _logger.warning("no checkpoint of step %d: %s; training goes on", self.step, why)
            self._note_events([{"event": "checkpoint_failed", "step": self.step, "why": why}])
        else:
            if has_begun:
                self._under_way.add(self.step)

    def save_and_wait(self, extras: Callable[[], Tree]) -> None:
        """A checkpoint of the step just finished is on disk after this, or it was said why not."""
        self.wait()
        progress = self._judgement.progress
        is_there = progress.saved_step == self.step and not progress.has_failed
        # A checkpoint is of all ranks or of none.
        if self._agreement.any(not is_there):
            self.save(extras)
            self.wait()

    def wait(self) -> None:
        """Until all that was begun is on disk or has failed."""
        try:
            self._started_engine().wait(self._settings.last_save_s)
        except WaitTimedOut as error:
            _logger.warning("%s; its writer goes on alone", error)
        self._take_events()

    def end(self) -> None:
        """The run ends on purpose: whoever starts next will not count a failure."""
        self._judgement.record.end()
        self._agreement.close()

    def close(self) -> None:
        """Gives everything back, after `end` or after something went wrong."""
        self._remove_hooks()
        self._signals.stop()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            self._note_events(engine.poll())

    def _wish(self) -> Wish:
        is_busy = len(self._under_way) >= self._num_slots
        if self.rank == 0 and not self._is_owed and not self._is_asked_for:
            self._is_asked_for = self._is_due()
            if self._is_asked_for and is_busy:
                self._tell_delayed()
        return Wish(
            should_save=self._is_asked_for and not self._is_owed,
            is_busy=is_busy,
            signal=self._signals.received,
        )

    def _tell_delayed(self) -> None:
        steps = sorted(self._under_way)
        _logger.info("the checkpoint due after step %d waits for those of %s", self.step, steps)
        self._tell("checkpoint_delayed", step=self.step, waits_for=steps)

    def _is_due(self) -> bool:
        return self._judgement.is_due(
            self.step,
            measured=self._started_engine().costs,
            total_steps=self._total_steps,
            loader_length=self._loader_length,
        )

    def _leave(self, number: int, extras: Callable[[], Tree]) -> None:
        self._leaving = None
        self._tell("signal", number=number, name=signal.Signals(number).name, step=self.step)
        self.save_and_wait(extras)
        self._judgement.record.end()
        self._signals.pass_on(number)
        # Whoever got it decided to go on.
        self._judgement.record.go_on()

    def _capture(self, extras: Callable[[], Tree]) -> tuple[FlatState, Layout | None]:
        kept = {"loop": extras(), "saver": self._judgement.kept()}
        return capture(self._subjects, kept, rank=self.rank, size=self._agreement.size)

    # Events.

    def _take_events(self) -> None:
        self._note_events(self._started_engine().poll())

    def _note_events(self, events: list[Mapping[str, object]]) -> None:
        for event in events:
            self.events.append({"time": time.time(), **event})
            self._judgement.note(event)
            step = event["step"]
            assert isinstance(step, int)
            self._under_way.discard(step)

    def _tell(self, event: str, **fields: object) -> None:
        self.events.append({"event": event, "time": time.time(), **fields})

    def _note_update(self) -> None:
        self._has_updated = True

    def _started_engine(self) -> Engine:
        assert self._engine is not None, "begin() comes first"
        return self._engine
