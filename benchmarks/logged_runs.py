"""Runs of one pipeline of emulated devices that may log, and what their events tell of replays.

Each run has a folder of its own for its checkpoints and its log, which goes with it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from launched import EverstepRun, run_everstep

STAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One replica of `STAGES` stages."""

    steps: int
    slot_s: float
    """Of F, of B and of W, of one micro-batch."""

    microbatches: int = 8
    message_bytes: int = 1_000_000
    """Of each activation and each gradient."""

    state_bytes: int = 0
    """Of each stage, saved and loaded, beside the layer that is trained."""

    every: int | None = None
    """Steps between checkpoints; None for CheckFreq's rule."""

    log_memory: str | None = None
    """None: nothing is logged."""

    log_turns: int | None = None
    """So many steps are logged, as many are not, and so on (log_turns.py)."""

    helpers: int | None = None
    kills: tuple[str, ...] = ()
    """Each R:S@STEP."""

    def arguments(self) -> Iterator[object]:
        yield from (STAGES, self.microbatches, self.steps, self.slot_s)
        yield from ("--message-bytes", self.message_bytes, "--state-bytes", self.state_bytes)
        options = (
            ("--every", self.every),
            ("--log-memory", self.log_memory),
            ("--log-turns", self.log_turns),
            ("--helpers", self.helpers),
        )
        for option, value in options:
            if value is not None:
                yield from (option, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One replay, from the coordinator's word to the stage's state."""

    num_steps: int
    seconds: float
    """With what is done once: connecting, building the stage, loading its checkpoint."""

    num_replayers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    run: EverstepRun
    held: list[dict[str, int]]
    """What the log of each worker held at most; those of killed workers are not among them."""

    @property
    def step_s(self) -> float:
        return median(self.run.step_times_s)

    @property
    def training_s(self) -> float:
        """From the start of the first step to the end of the last, failures and all."""
        began, ended = self.run.of("generation")[0], self.run.of("finished")[0]
        return float(ended["time"]) - float(began["time"])

    @property
    def outages_s(self) -> list[float]:
        """From each kill to the first step after it, whichever way led there."""
        lost_s, found = 0.0, []
        for event in self.run.events:
            if event["event"] == "worker_lost":
                lost_s = lost_s or event["time"]
            elif event["event"] == "step" and lost_s:
                found.append(event["time"] - lost_s)
                lost_s = 0.0
        return found

    @property
    def replays(self) -> list[Replayed]:
        return list(_replays(self.run.events))

    def most(self, what: str) -> int:
        return max(held[what] for held in self.held)

    @property
    def compute_s(self) -> float:
        """F, B and W of all micro-batches of a step, of the average stage."""
        parts = ("forward", "input_gradient", "weight_gradient")
        return median(
            sum(float(step["breakdown"][part]) for part in parts) for step in self.run.settled
        )


def run_logged(setting: Setting) -> LoggedRun:
    flags = [text for kill in setting.kills for text in ("--kill", kill)]
    with tempfile.TemporaryDirectory() as folder:
        run = run_everstep(
            "emulated_log_job.py",
            *(folder, *setting.arguments()),
            replicas=1,
            stages=STAGES,
            flags=flags,
        )
        held = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("held-*.json"))]
        return LoggedRun(run=run, held=held)


def _replays(events: list[dict[str, Any]]) -> Iterator[Replayed]:
    began: dict[str, Any] = {}
    for event in events:
        if event["event"] == "rebuilding":
            began = event
        elif event["event"] == "rebuilt":
            yield Replayed(
                num_steps=began["last_step"] - began["checkpoint"],
                seconds=event["time"] - began["time"],
                num_replayers=len(began["replayers"]),
            )
