"""Whether a checkpoint is due: the policy, and what it looks at of this run and those before it.

    resumed(kept, ...)     what a checkpoint knew of the losses, the time and the costs before it
    begin()                the record of failures; step_done() and report() after every step
    is_due(...)            asked after a step, where the decision is made
    kept()                 goes into checkpoints, so that a run that comes back knows its curve

Saves nothing, and knows nothing of ranks, stages or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.checkpoint.curve import LossHistory
from everstep.checkpoint.loss_log import LossLog
from everstep.checkpoint.objectives import LostProgress
from everstep.checkpoint.policy import Policy, Situation
from everstep.checkpoint.progress import Kept, Progress
from everstep.checkpoint.run_record import RunRecord, local_directory
from everstep.checkpoint.telemetry import Measured


class Judgement:
    def __init__(
        self,
        policy: Policy | None,
        *,
        directory: str | Path,
        workers: int,
        is_recorder: bool = True,
    ) -> None:
        """`is_recorder`: whether failures are counted here; the others only read what was."""
        self.progress = Progress()
        self.record = RunRecord(local_directory(directory), workers=workers, is_writer=is_recorder)
        self._policy: Policy = policy or LostProgress()
        self._workers = workers
        self._history = LossHistory()
        self.losses = LossLog(self._history)

    def resumed(self, kept: Mapping[str, Any] | None, *, step: int, took_s: float) -> None:
        """Training goes on after `step` steps. Checkpoints of old live jobs have kept nothing."""
        self._history = LossHistory()
        self.losses = LossLog(self._history)
        self.progress = Progress(None if kept is None else Kept(**kept["progress"]))
        if kept is not None:
            self.losses.load(kept["losses"])
        self.progress.resumed(step, took_s=took_s)

    def kept(self) -> dict[str, Any]:
        return {"progress": asdict(self.progress.kept()), "losses": self.losses.to_tensor()}

    def is_due(
        self,
        step: int,
        *,
        measured: Measured,
        total_steps: int | None,
        loader_length: int | None = None,
    ) -> bool:
        """After `step` steps. A policy that takes its time is not asked each time."""
        progress = self.progress
        if not progress.should_ask():
            return False
        situation = Situation(
            step=step,
            steps_since=step - progress.saved_step,
            seconds=progress.seconds,
            seconds_since=progress.seconds - progress.saved_at_s,
            costs=progress.costs(measured),
            failure_rate=self.record.failures_per_second,
            total_steps=total_steps,
            workers=self._workers,
            curve=self._history.curve(),
            spent_s=progress.spent_s,
            num_taken=progress.num_taken,
            loader_length=loader_length,
        )
        with progress.asking():
            return self._policy.is_due(situation)

    def note(self, event: Mapping[str, object]) -> None:
        """What became of a save."""
        self.progress.note(event)
        if event["event"] == "checkpoint":
            self.record.note(self.progress.unrecorded_seconds())
