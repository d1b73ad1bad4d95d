"""The account of one system over one trace: steps, pauses by cause, what was lost, the curve.

Moves in one go from change to change, whatever number of steps and checkpoints lie between. Knows
no system. Invariant: useful time, pauses and rework add up to the time that has passed.

A step and its checkpoints, k steps apart; `since` counts the steps of the cycle that are done:

    | step | step | ... k ... | stall | step | step | ...
    ^ the last save             ^ the next
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    NOTICING = "noticing"
    GROUPS = "groups"
    COPY = "copy"
    BOUNDARY = "boundary"
    """A new worker waits for the step it joins after, and the others go on without it."""

    FILLING = "filling"
    """The first step of a generation starts with an empty pipeline."""

    UNDO = "undo"
    RESTART = "restart"
    LOADING = "loading"
    REPLAY = "replay"
    """Of logs, by the stages whose state was gone; nobody else runs anything again."""

    REDO = "redo"
    """Part of a step that was interrupted, and is run again."""

    REWORK = "rework"
    """Whole steps since the last checkpoint, run again."""

    STALL = "checkpoint stall"
    WAITING = "waiting"
    """Too few workers are left to go on."""


@dataclass(slots=True)
class Account:
    samples_per_step: int
    now_s: float = 0.0
    steps: float = 0.0
    """Done and not rolled back; in whole batches, also where a system runs smaller ones."""

    step_s: float = math.inf
    steps_lost: float = 0.0
    num_saves: int = 0
    num_roll_backs: int = 0
    down_s: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    rungs: Counter[str] = field(default_factory=Counter)
    curve_s: list[float] = field(default_factory=list)
    curve_rate: list[float] = field(default_factory=list)
    """Samples per second from the same place of `curve_s` on."""

    interval_steps: float = math.inf
    interval_s: float = math.inf
    """At the pace of the time when it was chosen."""

    stall_s: float = 0.0
    durable_s: float = 0.0
    _pauses: list[tuple[Cause, float]] = field(default_factory=list)
    _since: float = 0.0
    _run_s: float = 0.0
    """Spent on the steps since the last save."""

    _saved_s: float = -math.inf
    _saved_steps: float = 0.0
    _before: tuple[float, float] = (0.0, 0.0)
    """Steps at the save before the last one, and the time spent from there to the last."""

    # What systems say.

    def run_at(self, step_s: float) -> None:
        """From now on, or from the end of the pauses on; infinity for standing still."""
        self.step_s = step_s

    def save_every(self, steps: float, *, stall_s: float, durable_s: float) -> None:
        self.interval_steps, self.stall_s, self.durable_s = steps, stall_s, durable_s
        self.interval_s = steps * self.step_s

    def pause(self, *parts: tuple[Cause, float]) -> None:
        """Standing still from now on. What is left of earlier pauses runs at the same time; the
        longer one counts."""
        left_s = sum(seconds for _, seconds in self._pauses)
        wanted_s = sum(seconds for _, seconds in parts)
        tail: list[tuple[Cause, float]] = []
        keep_s = left_s - wanted_s
        for cause, seconds in reversed(self._pauses):
            if keep_s <= 0:
                break
            tail.insert(0, (cause, min(seconds, keep_s)))
            keep_s -= seconds
        self._pauses = [*parts, *tail]

    def drop_partial_step(self) -> None:
        """The step that was interrupted is run again from its beginning."""
        part = min(self.steps - math.floor(self.steps + 1e-9), self._since)
        if part <= 0:
            return
        self._unwork(part, Cause.REDO)

    @property
    def _is_last_durable(self) -> bool:
        return self.now_s - self._saved_s >= self.durable_s

    @property
    def newest_durable_s(self) -> float:
        """When the newest checkpoint that is durable was taken; the beginning is one."""
        taken_s = self._saved_s if self._is_last_durable else self._saved_s - self._before[1]
        return max(taken_s, 0.0)

    @property
    def steps_since_durable(self) -> float:
        """Whole steps that only the newest durable checkpoint does not hold."""
        before = 0.0 if self._is_last_durable else self._saved_steps - self._before[0]
        return before + math.floor(self._since + 1e-9)

    def roll_back(self) -> None:
        """To the newest checkpoint that was durable."""
        self.num_roll_backs += 1
        if not self._is_last_durable:
            self.steps_lost += self._saved_steps - self._before[0]
            self.down_s[Cause.REWORK] += self._before[1]
            self._saved_steps = self._before[0]
        self.drop_partial_step()
        self.steps_lost += self._since
        self.down_s[Cause.REWORK] += self._run_s
        self.steps = self._saved_steps
        self._since = self._run_s = 0.0
        self._before = (self._saved_steps, 0.0)

    def save_now(self) -> None:
        """All that is done is durable: there was time to save before the loss."""
        self.drop_partial_step()
        self._saved_s, self._saved_steps = -math.inf, self.steps
        self._since = self._run_s = 0.0

    # What the loop says.

    def advance(self, to_s: float) -> None:
        self._stand_still(to_s)
        if math.isinf(self.step_s):
            self._mark(0.0)
            self.down_s[Cause.WAITING] += to_s - self.now_s
            self.now_s = to_s
            return
        if to_s > self.now_s:
            self._mark(self.samples_per_step / self.step_s)
            self._run(to_s - self.now_s)
            self.now_s = to_s

    def reaches_s(self, steps: float) -> float:
        """When so many will be done, if nothing changes and nobody saves before."""
        pauses_s = sum(seconds for _, seconds in self._pauses)
        return self.now_s + pauses_s + max(0.0, steps - self.steps) * self.step_s

    @property
    def useful_s(self) -> float:
        return self.now_s - sum(self.down_s.values())

    def _stand_still(self, to_s: float) -> None:
        while self._pauses and self.now_s < to_s:
            cause, seconds = self._pauses.pop(0)
            spent_s = min(seconds, to_s - self.now_s)
            if spent_s > 0:
                self._mark(0.0)
                self.down_s[cause] += spent_s
                self.now_s += spent_s
            if spent_s < seconds:
                self._pauses.insert(0, (cause, seconds - spent_s))

    def _run(self, seconds: float) -> None:
        if math.isinf(self.interval_steps):
            self.steps += seconds / self.step_s
            self._since += seconds / self.step_s
            self._run_s += seconds
            return
        # A rate that has changed may make the cycle shorter than what is done of it.
        done = min(self._since, self.interval_steps)
        cycle_s = self.interval_steps * self.step_s + self.stall_s
        num_cycles, rest_s = divmod(done * self.step_s + seconds, cycle_s)
        after = min(rest_s / self.step_s, self.interval_steps)
        gained = num_cycles * self.interval_steps + after - done
        if num_cycles:
            self._note_saves(int(num_cycles), done, self.now_s + seconds - rest_s)
            self._since, self._run_s = after, after * self.step_s
            self.steps = self._saved_steps + after
        else:
            self._since += gained
            self._run_s += gained * self.step_s
            self.steps += gained
        self.down_s[Cause.STALL] += max(0.0, seconds - gained * self.step_s)

    def _note_saves(self, number: int, done: float, at_s: float) -> None:
        """`done` steps of the first cycle were there before; the last cycle ended at `at_s`."""
        self.num_saves += number
        last = round(self.steps + number * self.interval_steps - done, 6)
        before = self._saved_steps if number == 1 else last - self.interval_steps
        self._before = (before, (last - before) * self.step_s)
        self._saved_steps, self._saved_s = last, at_s

    def _unwork(self, steps: float, cause: Cause) -> None:
        seconds = self._run_s if self._since <= 0 else self._run_s * steps / self._since
        self.down_s[cause] += seconds
        self.steps -= steps
        self._since -= steps
        self._run_s -= seconds

    def _mark(self, rate: float) -> None:
        if self.curve_rate and self.curve_rate[-1] == rate:
            return
        if self.curve_s and self.curve_s[-1] == self.now_s:
            self.curve_rate[-1] = rate
            return
        self.curve_s.append(self.now_s)
        self.curve_rate.append(rate)
