"""Checkpoints of a live job, as one worker takes part in them.

    beginning    newest_whole() says which checkpoint this worker could begin with; restore() does
    training     is_due() on the reporter asks for one; save() on one worker of each stage takes it
    afterwards   events() says what became of it

Each stage is one part, written by its first live worker: the coordinator says after which step, so
all parts are of one step, and names the generation, so parts of different ones are never joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.curve import LossHistory
from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.layout import Part
from everstep.checkpoint.objectives import LostProgress
from everstep.checkpoint.policy import Policy, Situation
from everstep.checkpoint.progress import Progress
from everstep.checkpoint.restore import Found, look_at, wait_writers
from everstep.checkpoint.retention import KeepLast, Retention
from everstep.checkpoint.run_record import RunRecord
from everstep.checkpoint.state import JSON, FlatState, flatten
from everstep.checkpoint.storage import step_name, steps_in
from everstep.core.errors import CheckpointCorrupt
from everstep.training.loading import load_part, load_step, read_part
from everstep.training.stage_tree import StageTree

WRITER_WITHIN_S = 60.0
"""How long a start waits for the writers of workers that were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """`Job(checkpoint=everstep.Checkpoints(directory=...))`: when and where a job is saved."""

    directory: str | Path
    """Seen by all workers."""

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
    ) -> None:
        """`part`: this worker's stage, and of how many."""
        self._settings = settings
        self._directory = Path(settings.directory)
        self._tree = tree
        self._part = part
        self._total_steps = total_steps
        self._num_workers = num_workers
        self._policy: Policy = settings.policy or LostProgress()
        self._history = LossHistory()
        self._loss: float | None = None
        """Of the last step, on the reporter."""

        self._progress = Progress()
        self._record: RunRecord | None = None
        self._engine: Engine | None = None
        self._saved: tuple[int, str | None] | None = None
        """The last step that was saved, and in which run of parts; None for one that was loaded."""

        self._whole: tuple[int, FlatState] | None = None
        """What `newest_whole` has read, until it is restored."""

    # Beginning.

    def newest_whole(self) -> int | None:
        """The step of the newest checkpoint of which this worker's part verifies, byte by byte."""
        wait_writers(self._directory, timeout_s=WRITER_WITHIN_S)
        passed_over: list[str] = []
        for step in steps_in(self._directory):
            seen = look_at(self._directory / step_name(step))
            if not isinstance(seen, Found):
                passed_over.append(f"{seen.path.name}: {seen.why}")
                continue
            try:
                self._whole = step, read_part(seen, self._tree)
            except CheckpointCorrupt as corrupt:
                passed_over.append(f"{seen.path.name}: {corrupt.why}")
            else:
                return step
        if passed_over:
            raise CheckpointCorrupt(
                str(self._directory),
                why=f"none of its {len(passed_over)} checkpoints verifies, the newest:"
                f" {passed_over[0]}",
            )
        return None

    def restore(self, step: int) -> None:
        if self._whole is None or self._whole[0] != step:
            load_step(self._directory, step, self._tree)
        else:
            source = str(self._directory / step_name(step))
            load_part(self._whole[1], self._tree, source=source)
        self._whole = None
        self._saved = step, None

    # Training.

    def is_due(self, step: int, loss: float | None) -> bool:
        """Asked after every step, on the reporter."""
        if self._record is None:
            self._record = RunRecord(self._directory, workers=self._num_workers, is_writer=True)
            self._directory.mkdir(parents=True, exist_ok=True)
            self._record.begin()
            self._progress.begin()
        self._loss = loss
        if loss is not None:
            self._history.add(step, loss)
        self._progress.step_done()
        progress = self._progress
        return self._policy.is_due(
            Situation(
                step=step + 1,
                steps_since=step + 1 - progress.saved_step,
                seconds=progress.seconds,
                seconds_since=progress.seconds - progress.saved_at_s,
                costs=progress.costs(self._started_engine().costs),
                failure_rate=self._record.failures_per_second,
                total_steps=self._total_steps,
                workers=self._num_workers,
                curve=self._history.curve(),
                spent_s=progress.spent_s,
                num_taken=progress.num_taken,
            )
        )

    def save(self, step: int, *, run: str) -> None:
        """Starts a copy of the state, which is that after `step`, unless it is saved already."""
        if self._saved in ((step, run), (step, None)):
            return
        self._saved = step, run
        flat = flatten(self._tree.tree(), volatile=self._tree.moving_names)
        # After the last step there is no next one to make up for it.
        wait_s = WRITER_WITHIN_S if step == self._total_steps - 1 else 0.0
        about: dict[str, JSON] = {} if self._loss is None else {"loss": self._loss}
        self._started_engine().save(step, flat, about=about, run=run, wait_s=wait_s)

    def abandon(self, step: int) -> None:
        """The checkpoint of `step` has failed on another stage."""
        if self._engine is not None:
            self._engine.abandon(step, why="it has failed on another stage")

    def asked(self, step: int) -> None:
        """A checkpoint of `step` is being taken, here or elsewhere."""
        self._progress.saving(step + 1)

    def before_update(self) -> None:
        """Returns when the state may be changed."""
        if self._engine is not None:
            self._engine.before_update()

    def events(self) -> list[Mapping[str, object]]:
        if self._engine is None:
            return []
        events = self._engine.poll()
        for event in events:
            self._progress.note(event)
        return events

    def close(self) -> list[Mapping[str, object]]:
        """Waits until what was saved is on disk; what became of it."""
        if self._record is not None:
            self._record.end()
        if self._engine is not None:
            self._engine.close()
        return self.events()

    def _started_engine(self) -> Engine:
        if self._engine is None:
            index, of = self._part
            self._engine = Engine(
                self._directory,
                part=Part(index, of, run="begin"),
                settings=self._settings.engine,
                keep=self._settings.keep or KeepLast(2),
            )
        return self._engine
