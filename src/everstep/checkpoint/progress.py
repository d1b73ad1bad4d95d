"""How far and how long a job has trained over all its runs, and what its checkpoints cost.

Holds no decision: it is what the policy's `Situation` is filled from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from everstep.checkpoint.policy import Costs
from everstep.checkpoint.telemetry import Measured

_NEWEST_WEIGHT = 0.05
"""Of the newest step in the running mean of step times."""

_ASKING_FRACTION = 0.01
_QUICK_ANSWER_S = 5e-5
"""A policy that takes longer to answer is asked less often: in so much of the time at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What goes into a checkpoint."""

    seconds: float = 0.0
    """Training so far, without what was lost and run again."""

    spent_s: float = 0.0
    """Stall of all checkpoints so far."""

    num_taken: int = 0
    step_s: float = 0.0


class Progress:
    def __init__(
        self, kept: Kept | None = None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        kept = kept or Kept()
        self.seconds = kept.seconds
        self.spent_s = kept.spent_s
        self.num_taken = kept.num_taken
        self.saved_step = 0
        """The last step of which a checkpoint was begun, or resumed from."""

        self.saved_at_s = 0.0
        self.has_failed = False
        """Whether that one is known not to have become a checkpoint."""

        self.restore_s = 0.0
        self._step_s = kept.step_s
        self._now_s = now_s
        self._num_steps = 0
        self._is_saving = False
        self._boundary_s = now_s()
        self._recorded_s = kept.seconds
        self._asking_s = 0.0
        self._asked_s = -float("inf")

    def resumed(self, step: int, *, took_s: float) -> None:
        self.saved_step, self.saved_at_s, self.restore_s = step, self.seconds, took_s

    def begin(self) -> None:
        self._boundary_s = self._now_s()

    def step_done(self) -> None:
        now_s = self._now_s()
        took_s, self._boundary_s = now_s - self._boundary_s, now_s
        self.seconds += took_s
        self._num_steps += 1
        # The first step warms up, and one that a copy ran beside is not a plain one.
        if self._num_steps > 1 and not self._is_saving:
            weight = max(_NEWEST_WEIGHT, 1 / (self._num_steps - 1)) if self._step_s else 1.0
            self._step_s += weight * (took_s - self._step_s)
        self._is_saving = False

    def saving(self, step: int) -> None:
        self.saved_step, self.saved_at_s = step, self.seconds
        self.has_failed = False
        self._is_saving = True

    def note(self, event: Mapping[str, object]) -> None:
        """What became of a save."""
        if event["event"] == "checkpoint":
            stall_s = event["stall_seconds"]
            assert isinstance(stall_s, float)
            self.spent_s += stall_s
            self.num_taken += 1
        elif event["event"] == "checkpoint_failed" and event["step"] == self.saved_step:
            self.has_failed = True

    def costs(self, measured: Measured) -> Costs:
        return Costs(
            step_s=max(self._step_s or self.seconds, 1e-6),
            stall_s=measured.stall_s,
            durable_s=measured.durable_s,
            restore_s=self.restore_s,
            size_bytes=measured.size_bytes,
        )

    def should_ask(self) -> bool:
        """Whether the policy may be asked again already."""
        if self._asking_s <= _QUICK_ANSWER_S:
            return True
        return self._now_s() - self._asked_s >= self._asking_s / _ASKING_FRACTION

    @contextmanager
    def asking(self) -> Iterator[None]:
        began_s = self._now_s()
        yield
        self._asked_s = self._now_s()
        self._asking_s = self._asked_s - began_s

    def unrecorded_seconds(self) -> float:
        """Training since this was last asked."""
        seconds, self._recorded_s = self.seconds - self._recorded_s, self.seconds
        return seconds

    def kept(self) -> Kept:
        return Kept(
            seconds=self.seconds,
            spent_s=self.spent_s,
            num_taken=self.num_taken,
            step_s=self._step_s,
        )
