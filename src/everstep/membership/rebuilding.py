"""Rebuilding stages that nobody holds any more: who must be there first, and what is then replayed.

Pure. What is replayed by whom is the recovery room's decision (recovery/rebuild.py); wiring
connects the two. The survivors wait, with their states, until every lost stage has a new worker.
Invariant: whatever stands in the way of a replay is said, and everybody then loads the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.facts import LogFacts, LogRun, Replay, StageProfile
from everstep.membership.replacing import Replacements
from everstep.membership.roster import Shape, Worker

NEW_WORKER_WITHIN_S = 60.0
"""So long the others wait for a new worker of a lost stage."""

REPLAY_LIMIT = 3
"""Replays that may fail one after the other, because something cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    shape: Shape
    microbatches: int
    """Per replica."""

    lost_stages: frozenset[int]
    new: tuple[WorkerId, ...]
    """The workers that wait for the state of those stages."""

    holdings: Mapping[WorkerId, tuple[LogRun, ...]]
    """What the survivors have logged."""

    checkpoint: int
    """-1: none, but the model as it was built."""

    last_step: int
    helpers: int | None
    """At most so many; None for no limit."""

    durations: tuple[StageProfile, ...] | None
    """Measured, per stage."""

    period_s: float | None
    """Of a step of all stages; None while nothing is measured."""


@dataclass(frozen=True, slots=True)
class NoReplay:
    reason: str


class PlanReplay(Protocol):
    def __call__(self, request: ReplayRequest) -> tuple[Replay, ...] | NoReplay: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    stages: tuple[StageProfile, ...]
    """Measured, with the bytes they send in a step."""

    num_microbatches: int
    """Of a whole step."""

    num_workers: int
    interval_steps: int
    """From one checkpoint to the next."""

    log: LogFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    unlogged: tuple[int, ...]
    """Boundaries that need no log, because the stages on both sides are replayed together."""

    bytes: int
    """That all logs hold when they are longest."""

    expected_s: float
    """Of a recovery."""


class ChooseLogs(Protocol):
    def __call__(self, request: LogRequest) -> LogChoice: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """The new workers get their states by `replays`."""

    stages: frozenset[int]
    workers: Mapping[WorkerId, Worker]


@dataclass(frozen=True, slots=True)
class NotYet:
    """A new worker is on its way."""


Look: TypeAlias = Rebuild | NotYet | NoReplay


class Rebuilding:
    def __init__(
        self,
        books: Books,
        replacements: Replacements,
        plan: PlanReplay | None,
        choose: ChooseLogs | None,
    ) -> None:
        self._books = books
        self._replacements = replacements
        self._plan = plan
        self._choose = choose
        self._waits_since_s: float | None = None
        self._num_failed = 0
        self._why_failed = ""
        self._is_chosen = False

    def look(
        self, live: Mapping[WorkerId, Worker], waiting: Mapping[WorkerId, Worker], now_s: float
    ) -> Look:
        """`live` hold their states; of those who are `waiting`, the new ones hold none."""
        obstacle = self._obstacle(live, now_s)
        if obstacle is not None:
            return NoReplay(obstacle)
        held = {place.stage for place in live}
        lost = frozenset(range(self._books.shape.stages)) - held
        new = {p: w for p, w in waiting.items() if w.finished_step is None and p.stage in lost}
        missing = lost - {place.stage for place in new}
        if not missing:
            self._waits_since_s = None
            return Rebuild(stages=lost, workers=new)
        if not self._replacements.hurry(now_s) and not self._is_somebody_joining(missing):
            return NoReplay(f"nobody is started in the place of stage {min(missing)}")
        if self._waits_since_s is None:
            self._waits_since_s = now_s
            self._books.emit("awaiting", stages=sorted(missing))
        return NotYet()

    def _obstacle(self, live: Mapping[WorkerId, Worker], now_s: float) -> str | None:
        books = self._books
        if self._plan is None or books.job is None or books.job.log is None:
            return "nothing is logged"
        if not live:
            return "nobody is left who has logged anything"
        if self._num_failed >= REPLAY_LIMIT:
            return f"{self._num_failed} replays have failed, the last one: {self._why_failed}"
        operating = [str(place) for place, worker in live.items() if worker.is_operating]
        if operating:
            return f"worker {operating[0]} was in an evaluation, where a new one cannot take part"
        if self._waits_since_s is not None and now_s - self._waits_since_s > NEW_WORKER_WITHIN_S:
            return f"no new worker has come within {NEW_WORKER_WITHIN_S:g} s"
        return None

    def _is_somebody_joining(self, stages: frozenset[int]) -> bool:
        return any(place.stage in stages for place in self._books.roster.placed())

    @property
    def is_waiting(self) -> bool:
        return self._waits_since_s is not None

    def plan(
        self, rebuild: Rebuild, live: Mapping[WorkerId, Worker], *, last_step: int
    ) -> tuple[Replay, ...] | NoReplay:
        books = self._books
        assert books.job is not None
        assert books.job.log is not None
        assert self._plan is not None
        is_measured = books.plans.unit == "seconds" and books.plans.plan is not None
        planned = self._plan(
            ReplayRequest(
                shape=books.shape,
                microbatches=books.job.microbatches,
                lost_stages=rebuild.stages,
                new=tuple(rebuild.workers),
                holdings={place: worker.logged for place, worker in live.items()},
                checkpoint=books.durable_step,
                last_step=last_step,
                helpers=books.job.log.helpers,
                durations=books.plans.durations,
                period_s=books.plans.plan.period if is_measured and books.plans.plan else None,
            )
        )
        if not isinstance(planned, NoReplay):
            for replay in planned:
                books.emit("rebuilding", **_fields(replay))
        return planned

    def durable(self, step: int) -> None:
        """The checkpoint of `step` is whole on disk: only now is what was logged before it of no
        use, because a stage would begin with this one."""
        books = self._books
        interval_steps = step - books.durable_step
        books.durable_step = max(books.durable_step, step)
        if books.job is None or books.job.log is None:
            return
        for worker in books.roster.here():
            books.send(worker.uid, m.Durable(books.durable_step))
        if self._choose is not None and books.plans.durations is not None and interval_steps > 0:
            self._choose_logs(self._choose, books.job.log, interval_steps)

    def _choose_logs(self, choose: ChooseLogs, log: LogFacts, interval_steps: int) -> None:
        books = self._books
        assert books.job is not None
        assert books.plans.durations is not None
        choice = choose(
            LogRequest(
                stages=books.plans.durations,
                num_microbatches=books.shape.replicas * books.job.microbatches,
                num_workers=books.shape.num_workers,
                interval_steps=interval_steps,
                log=log,
            )
        )
        if choice.unlogged == books.unlogged and self._is_chosen:
            return
        self._is_chosen = True
        books.unlogged = choice.unlogged
        books.emit(
            "logging",
            unlogged=list(choice.unlogged),
            bytes=choice.bytes,
            expected_seconds=choice.expected_s,
            interval_steps=interval_steps,
        )
        for worker in books.roster.here():
            books.send(worker.uid, m.LogLess(choice.unlogged))

    def failed(self, why: str) -> None:
        self._num_failed += 1
        self._why_failed = why

    def succeeded(self) -> None:
        self._num_failed = 0

    def forget(self) -> None:
        """Everybody begins again: nobody is waited for, and the next replay is another one."""
        self._waits_since_s = None
        self._num_failed = 0


def _fields(replay: Replay) -> dict[str, object]:
    return {
        "stages": list(range(replay.first_stage, replay.last_stage + 1)),
        "checkpoint": replay.checkpoint,
        "last_step": replay.last_step,
        "replayers": [str(place) for place in replay.replayers],
        "rebuilt": [str(place) for place in replay.rebuilt],
        "is_shared": replay.is_shared,
    }
