"""A run: the plain iterator that a user's loop goes over, on every worker alike.

The one place where the end of a generation is normal life: whatever it interrupts is done again in
the next one. What the user has been given (`_served`) and what this worker's state is at
(`_finished_step`) can differ by one after a recovery; the run catches up before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from everstep.core.clock import Clock
from everstep.core.errors import (
    CheckpointCorrupt,
    EverstepError,
    GenerationEnded,
    LogCorrupt,
    LogEntryMissing,
    NotInCheckpoint,
    PeerLost,
    PeerRefused,
    PeerSilent,
    StoreUnreachable,
)
from everstep.core.points import Point, passing
from everstep.execute.data import Dataset
from everstep.execute.evaluation import Evaluation
from everstep.execute.executor import Clipping, Executor, upcoming
from everstep.execute.links import Links
from everstep.execute.replay import Piece
from everstep.execute.timing import Profiler
from everstep.membership.facts import ClipMode
from everstep.recovery.log import LogReport
from everstep.schedule.actions import Action
from everstep.training.copying import copy_states
from everstep.training.gathering import gather
from everstep.training.guide import Guide
from everstep.training.holding import Holding
from everstep.training.operations import Operations, Result
from everstep.training.orders import Orders, Stand
from everstep.training.pace import Pace
from everstep.training.rebuilding import Rebuilder
from everstep.training.saves import Saves
from everstep.training.saving import StageSaver
from everstep.training.stage_log import StageLog

HALT_WITHIN_S = 60.0
"""A peer's connection may break before the coordinator's word arrives; it must by then."""

LEAVE_WITHIN_S = 10.0

REPLAY_WITHIN_S = 3600.0
"""So long others wait for the stages that are rebuilt: gloo's own limit."""

UNREADABLE = (LogCorrupt, LogEntryMissing, CheckpointCorrupt, NotInCheckpoint)
"""What a replay may find missing: then there may be another way."""

INTERRUPTIONS = (GenerationEnded, PeerLost, PeerSilent, PeerRefused, StoreUnreachable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One finished step, as this worker saw it."""

    index: int
    loss: float | None
    """The mean over the whole batch; known on the last stage, so on the reporter."""

    metrics: dict[str, float]
    seconds: float
    is_reporter: bool
    """True on exactly one live worker."""


class Connect(Protocol):
    def __call__(self, orders: Orders) -> Links:
        """Connects to the peers of a generation."""


class Run:
    """Iterate over it to train; evaluate or take the weights between steps."""

    def __init__(
        self,
        holding: Holding,
        guide: Guide,
        connect: Connect,
        *,
        steps: int,
        clock: Clock,
        saver: StageSaver | None = None,
        log: StageLog | None = None,
        rebuilder: Rebuilder | None = None,
    ) -> None:
        """`log` and `rebuilder`: both or none."""
        self.steps = steps
        self._holding = holding
        self._saves = None
        if saver is not None:
            me, num_stages = holding.me, holding.stage.num_stages
            self._saves = Saves(saver, guide, me=me, num_stages=num_stages, steps=steps)
        self._log = log
        self._rebuilder = rebuilder
        self._guide = guide
        self._connect = connect
        self._clock = clock
        self._finished_step: int | None = None
        self._is_over = False
        self._links: Links | None = None
        self._results: dict[int, Step] = {}
        self._operations = Operations()
        self._begin(guide.next_orders())
        self._served = self._state_step

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._is_over:
            raise StopIteration
        if self._served + 1 == self.steps:
            # The last step stands only when everybody has finished it.
            self._uninterrupted(lambda: None)
            self._finish()
            raise StopIteration
        self._served += 1
        self._catch_up()
        step = self._results.pop(self._served)
        self._results.clear()  # of steps that were run again and had been given already
        return step

    @property
    def is_reporter(self) -> bool:
        """Whether this is the one live worker that speaks for all."""
        return self._holding.me == self._orders.lead(self._holding.stage.num_stages - 1)

    def evaluate(self, dataset: Dataset) -> dict[str, float]:
        """The mean loss and metrics over `dataset`, without training. Call it on every worker."""
        holding, job = self._holding, self._holding.job

        def operation() -> dict[str, float]:
            passing(Point.BEFORE_EVALUATE, step=self._state_step)
            evaluation = Evaluation(
                holding.stage,
                self._connected,
                microbatch_size=job.batch_size // (holding.replicas * job.microbatches),
                replicas=holding.replicas,
                microbatches=job.microbatches,
                metrics=list(job.metrics),
            )
            return evaluation.run(dataset, self._actions)

        return self._operations.perform(operation, self._uninterrupted)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's, with the keys of `job.model()`, on the reporter; empty on the others.
        Call it on every worker."""

        def operation() -> dict[str, Tensor]:
            passing(Point.BEFORE_GATHER, step=self._state_step)
            return gather(self._holding, self._orders, self._connected)

        return self._operations.perform(operation, self._uninterrupted)

    def log_report(self) -> LogReport | None:
        """What this worker's log holds, in memory and on disk; None when nothing is logged."""
        return None if self._log is None else self._log.report()

    def close(self) -> None:
        """Leaves the job when all are ready to. What a peer still has to read is not cut off.

        A loop that all have left early, at the same step, has finished as well.
        """
        if self._links is not None:
            with suppress(EverstepError):
                self._uninterrupted(self._meet)
                self._finish()
        links, self._links = self._links, None
        if links is not None:
            links.close()
        if self._holding.fetcher is not None:
            self._holding.fetcher.close()
        if self._log is not None:
            self._log.close()
        if self._saves is not None:
            if self._is_over:
                self._saves.close()
            else:
                self._saves.leave()

    def _tend_log(self) -> None:
        if self._log is None:
            return
        self._log.scales |= self._holding.update.take_clipped()
        durable_step, unlogged = self._guide.needs_no_log()
        self._log.tend(durable_step=durable_step, unlogged=unlogged)

    def _meet(self, *, timeout_s: float = LEAVE_WITHIN_S) -> None:
        """Returns when every worker is here."""
        self._connected.world.all_reduce(torch.zeros(1)).wait(timeout_s)

    def _finish(self) -> None:
        if not self._is_over:
            self._guide.report_finished()
            self._is_over = True

    @property
    def _state_step(self) -> int:
        """The step that this worker's state is at the end of."""
        assert self._finished_step is not None, "a run begins with a state"
        return self._finished_step

    @property
    def _connected(self) -> Links:
        assert self._links is not None, "the run is closed"
        return self._links

    def _catch_up(self) -> None:
        """Trains until the state is at what the user has been given."""
        while True:
            try:
                while self._state_step < self._served:
                    self._train_one(self._state_step + 1)
                return
            except INTERRUPTIONS as interruption:
                self._change_generation(interruption)

    def _uninterrupted(self, operation: Callable[[], Result]) -> Result:
        """Runs `operation` when everybody has finished the last step, until it succeeds."""
        while True:
            self._catch_up()
            try:
                self._pace.wait_watermark(self._state_step)
                self._operations.serve_again()
                return operation()
            except INTERRUPTIONS as interruption:
                self._change_generation(interruption)

    def _train_one(self, step: int) -> None:
        """Trains `step`, or changes the generation where that was agreed on."""
        self._operations.serve_again()
        if self._leave_at_boundary():
            return  # with a state that may be another than before
        replanned = self._guide.take_replan(step)
        if replanned is not None:
            self._follow(replanned, first_step=step)
        is_profiled = self._profiler.num_steps < self._orders.profile_steps
        report = self._executor.run(step, self._actions, is_profiled=is_profiled)
        self._finished_step = step
        self._operations.step_done()
        self._guide.report_step(report)
        if self._saves is not None:
            self._saves.step_done(report)
        self._tend_log()
        self._profiler.add(report.times)
        if self._profiler.num_steps == self._orders.profile_steps:
            sent = {} if self._log is None else self._log.step_bytes
            self._guide.report_profile(self._profiler, sent=sent)
        self._results[step] = Step(
            index=step,
            loss=report.loss,
            metrics=report.metrics,
            seconds=report.seconds,
            is_reporter=self.is_reporter,
        )

    def _leave_at_boundary(self) -> bool:
        """Ends the generation where it was agreed to end; nothing is interrupted.

        Only on the way into a step: what scripts do between steps, a new worker's script would not
        take part in, because it has not seen the step before.
        """
        if not self._guide.is_boundary(self._state_step):
            return False
        self._report_halted()
        orders = self._guide.next_orders()
        # Only now has everybody left: what they still had to read was not cut off.
        self._disconnect()
        self._begin(orders)
        return True

    def _change_generation(self, interruption: EverstepError) -> None:
        if not self._orders.lifetime.has_ended:
            self._guide.report_broken(str(interruption))
            self._guide.wait_halt(timeout_s=HALT_WITHIN_S)
        self._disconnect()
        self._report_halted()
        self._begin(self._guide.next_orders())

    def _report_halted(self) -> None:
        # A new worker that has no state yet stops before the step it was to begin with.
        finished = self._finished_step
        passing(Point.HALTED, step=self._orders.step - 1 if finished is None else finished)
        stand = Stand(
            finished_step=finished,
            operations=self._operations.num_completed,
            is_operating=self._operations.is_operating,
            logged=() if self._log is None else self._log.runs(),
        )
        self._guide.report_halted(stand)

    def _disconnect(self) -> None:
        if self._links is not None:
            self._links.close()
            self._links = None
        self._holding.stage.abandon()

    def _begin(self, orders: Orders) -> None:
        """Connects for a generation, and for the next when that one ends meanwhile."""
        self._orders = orders
        self._pace = Pace(self._guide, orders.lifetime, self._saves)
        if self._log is not None:
            self._log.begin(attempt=orders.generation, unlogged=orders.unlogged)
        self._adjust(orders)
        self._profiler = Profiler()
        self._follow(orders.actions, first_step=orders.step)
        began_s = self._clock.now_s()
        try:
            self._links = self._connect(orders)
            connected_s = self._clock.now_s()
            self._copy(orders, self._links)
            self._replay(orders, self._links)
        except INTERRUPTIONS as interruption:
            self._change_generation(interruption)
            return
        self._guide.report_resumed(
            connect_s=connected_s - began_s, copy_s=self._clock.now_s() - connected_s
        )
        if self._saves is not None:
            self._saves.begin(orders)
        self._executor = self._make_executor(orders, self._links)
        if self._is_over:
            self._guide.report_finished()

    def _adjust(self, orders: Orders) -> None:
        """What is done before anything else, even when the generation is over again already."""
        self._pace.before_update()
        if orders.restore is not None:
            assert self._saves is not None, "only a job with checkpoints is told to load one"
            self._saves.restore(orders.restore)
        if self._finished_step is None:
            # A new worker: it begins with what it built, or waits for a copy.
            is_target = any(copy.target == self._holding.me for copy in orders.copies)
            is_target |= any(self._holding.me in replay.rebuilt for replay in orders.replays)
            self._finished_step = None if is_target else orders.step - 1
            self._operations.num_completed = orders.operations
            return
        if orders.redo is not None:
            self._holding.update.redo(scale=orders.redo.scale)
            if self._log is not None:
                self._log.scales[orders.redo.step] = orders.redo.scale
        if orders.undo:
            self._holding.update.take_back()
            self._finished_step -= 1
        self._operations.resume(orders.operations)

    def _copy(self, orders: Orders, links: Links) -> None:
        if not orders.copies:
            return
        assert links.channels is not None
        if not copy_states(self._holding, orders, links.channels):
            return
        step = orders.step - 1
        self._finished_step = step
        self._operations.num_completed = orders.operations
        self._results[step] = Step(
            index=step,
            loss=None if orders.result is None else orders.result.loss,
            metrics={} if orders.result is None else orders.result.metrics,
            seconds=0.0,
            is_reporter=self.is_reporter,
        )
        self._guide.report_copied(step)

    def _replay(self, orders: Orders, links: Links) -> None:
        """Takes part in rebuilding lost stages. Training goes on when all are there again."""
        if not orders.replays:
            return
        assert self._rebuilder is not None, "only a job with logs is told to replay"
        assert links.channels is not None
        holding = self._holding
        for replay, group in zip(orders.replays, links.replays, strict=True):
            try:
                result = self._rebuilder.take_part(
                    replay,
                    own=Piece(stage=holding.stage, update=holding.update),
                    group=group,
                    channels=links.channels,
                    attempt=orders.generation,
                    check=orders.lifetime.check,
                    on_failed=self._guide.report_replay_failed,
                )
            except UNREADABLE as error:
                self._guide.report_replay_failed(str(error))
                self._guide.wait_halt(timeout_s=HALT_WITHIN_S)
                raise GenerationEnded(orders.generation) from error
            if result is not None:
                self._finished_step = replay.last_step
                self._operations.num_completed = orders.operations
                norm_squared = (
                    None if holding.job.clip_norm is None else holding.update.norm_squared()
                )
                self._guide.report_replayed(replay.last_step, result, norm_squared=norm_squared)
        self._meet(timeout_s=REPLAY_WITHIN_S)

    def _make_executor(self, orders: Orders, links: Links) -> Executor:
        holding, job = self._holding, self._holding.job
        clipping = None
        if job.clip_norm is not None:
            is_late = job.clip_mode is ClipMode.POST_VALIDATED and orders.meeting is not None
            clipping = Clipping(norm=job.clip_norm, is_post_validated=is_late)
        return Executor(
            holding.stage,
            holding.update,
            links=links,
            pace=self._pace,
            fetcher=holding.fetcher,
            num_microbatches=holding.replicas * job.microbatches,
            clipping=clipping,
            clock=self._clock,
            log=self._log,
        )

    def _follow(self, actions: tuple[Action, ...], *, first_step: int) -> None:
        self._actions = actions
        if self._holding.fetcher is not None:
            self._holding.fetcher.expect(upcoming(actions, first_step=first_step))
