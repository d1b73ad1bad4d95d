"""Checkpoints of a live job, as one worker takes part in them.

    beginning    newest_whole() says which checkpoint this worker could begin with; restore() does
    training     is_due() on the reporter asks for one; save() on one worker of each stage takes it,
                 through memory that prepare() has made after its first step
    afterwards   events() says what became of it

Each stage is one part, written by its first live worker: the coordinator says after which step, so
all parts are of one step, and names the generation, so parts of different ones are never joined.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.finding import find_newest
from everstep.checkpoint.judgement import Judgement
from everstep.checkpoint.layout import Part
from everstep.checkpoint.policy import Policy
from everstep.checkpoint.restore import Found
from everstep.checkpoint.retention import KeepLast, Retention
from everstep.checkpoint.state import JSON, FlatState, flatten
from everstep.core.errors import CheckpointCorrupt, ConfigError
from everstep.training.loading import load_part, load_step, read_part
from everstep.training.stage_tree import StageTree

WRITER_WITHIN_S = 60.0
"""How long a start waits for the writers of workers that were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`Job(checkpoint=everstep.Checkpoints(directory=...))`: when and where a job is saved."""

    directory: str | Path
    """Seen by all workers: a path, or any fsspec URL."""

    policy: Policy | None = None
    """When to save. Default: where losing work would hurt most, in 3.5 % of the time at most."""

    keep: Retention | None = None
    """Which checkpoints stay. Default: the last two."""

    engine: EngineSettings | None = None


class StageSaver:
    """Of one worker."""

    def __init__(
        self,
        settings: Checkpoints,
        tree: StageTree,
        *,
        part: tuple[int, int],
        total_steps: int,
        num_workers: int,
        is_beginning: bool = True,
    ) -> None:
        """`part`: this worker's stage, and of how many. `is_beginning`: the job begins with this
        worker, or goes back to a checkpoint; else it joins."""
        self._settings = settings
        self._tree = tree
        self._part = part
        self._total_steps = total_steps
        self._is_beginning = is_beginning
        self._judgement = Judgement(
            settings.policy, directory=settings.directory, workers=num_workers
        )
        self._first_step: int | None = None
        """The first one that was trained here, since the job was last restored."""

        self._is_recording = False
        self._is_prepared = False
        self._engine: Engine | None = None
        self._saved: tuple[int, str | None] | None = None
        """The last step that was saved, and in which run of parts; None for one that was loaded."""

        self._whole: tuple[Found, FlatState] | None = None
        """What `newest_whole` has read, until it is restored."""

        self._reading_s = 0.0

    # Beginning.

    def newest_whole(self) -> int | None:
        """The step of the newest checkpoint of which this worker's part verifies, byte by byte."""
        began_s = time.monotonic()
        self._whole = find_newest(
            self._settings.directory,
            lambda found: (found, read_part(found, self._tree)),
            wait_s=WRITER_WITHIN_S,
        )
        self._reading_s = time.monotonic() - began_s
        return None if self._whole is None else self._whole[0].step

    def restore(self, step: int) -> None:
        began_s = time.monotonic()
        whole, self._whole = self._whole, None
        if whole is None or whole[0].step != step:
            loaded = self._load(step)
        else:
            loaded = load_part(whole[1], self._tree, source=str(whole[0].path))
        took_s = self._reading_s + time.monotonic() - began_s
        self._judgement.resumed(loaded.get("saver"), step=step + 1, took_s=took_s)
        self._saved = step, None
        self._first_step, self._is_recording = None, False
        self._reading_s = 0.0

    def _load(self, step: int) -> dict[str, Any]:
        """One that other workers have found."""
        try:
            return load_step(self._settings.directory, step, self._tree)
        except CheckpointCorrupt as corrupt:
            raise ConfigError(
                "checkpoint.directory",
                f"{str(self._settings.directory)!r}, where this worker cannot load step {step}",
                f"must be one that all workers see: others found it whole ({corrupt.why})",
            ) from corrupt

    # Training.

    def begin(self, *, run: str) -> None:
        """A generation begins, which saves as `run`: what was before its first step is no step's
        time, and whoever had not begun with a part in the last one never will."""
        self._judgement.progress.begin()
        if self._engine is not None:
            self._engine.hurry(run)

    def step_done(self, step: int, loss: float | None) -> None:
        """After every step, on every worker: any of the last stage may come to speak for all."""
        if self._first_step is None:
            self._first_step = step
        if loss is not None:
            self._judgement.losses.report(step, loss)
        self._judgement.progress.step_done()

    def prepare(self) -> None:
        """Memory for copies, once: after a step, when the optimizer has made its state. On those
        that save. Nobody waits: of a replacement that would be the whole pipeline."""
        if not self._is_prepared:
            self._is_prepared = True
            self._started_engine().prepare(self._flat(), is_awaited=False)

    def is_due(self, step: int) -> bool:
        """Asked after every step, on the reporter."""
        if not self._is_recording:
            self._is_recording = True
            # Whoever takes over from a reporter that was lost has seen no failure of the job.
            began_here = self._is_beginning and step == self._first_step
            self._judgement.record.begin(is_first=began_here)
        return self._judgement.is_due(
            step + 1, measured=self._started_engine().costs, total_steps=self._total_steps
        )

    def save(self, step: int, *, run: str) -> None:
        """Starts a copy of the state, which is that after `step`, unless it is saved already."""
        if self._saved in ((step, run), (step, None)):
            return
        self._saved = step, run
        # After the last step there is no next one to make up for it.
        wait_s = WRITER_WITHIN_S if step == self._total_steps - 1 else 0.0
        loss = self._judgement.losses.latest
        about: dict[str, JSON] = {} if loss is None else {"loss": loss}
        self._started_engine().save(step, self._flat(), about=about, run=run, wait_s=wait_s)

    def abandon(self, step: int) -> None:
        """The checkpoint of `step` has failed on another stage."""
        if self._engine is not None:
            self._engine.abandon(step, why="it has failed on another stage")

    def asked(self, step: int) -> None:
        """A checkpoint of `step` is being taken, here or elsewhere."""
        self._judgement.progress.saving(step + 1)

    def before_update(self) -> None:
        """Returns when the state may be changed."""
        if self._engine is not None:
            self._engine.before_update()

    def events(self) -> list[Mapping[str, object]]:
        if self._engine is None:
            return []
        events = self._engine.poll()
        for event in events:
            self._judgement.note(event)
        return events

    def close(self) -> list[Mapping[str, object]]:
        """Waits until what was saved is on disk; what became of it."""
        self._end_record()
        if self._engine is not None:
            self._engine.close()
        return self.events()

    def leave(self) -> None:
        """The job goes on without this worker, or ends before its time. Others may have been lost
        before they began their parts: a wait for those could be a long one."""
        self._end_record()
        if self._engine is not None:
            self._engine.leave()

    def _end_record(self) -> None:
        if self._is_recording:
            self._is_recording = False
            self._judgement.record.end()

    def _flat(self) -> FlatState:
        tree = self._tree.tree()
        index, of = self._part
        if index == of - 1:  # where the losses are known
            tree["saver"] = self._judgement.kept()
        return flatten(tree, volatile=self._tree.moving_names)

    def _started_engine(self) -> Engine:
        if self._engine is None:
            index, of = self._part
            self._engine = Engine(
                self._settings.directory,
                part=Part(index, of, run="begin"),
                settings=self._settings.engine,
                keep=self._settings.keep or KeepLast(2),
            )
        return self._engine
