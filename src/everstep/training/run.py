"""A run: the plain iterator that a user's loop goes over, on every worker alike.

The one place where the end of a generation is normal life: whatever it interrupts is done again in
the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from everstep.core.clock import Clock
from everstep.core.errors import EverstepError, GenerationEnded, PeerLost
from everstep.core.ids import WorkerId
from everstep.execute.data import Dataset, Fetcher
from everstep.execute.evaluation import Evaluation
from everstep.execute.executor import Clipping, Executor, upcoming
from everstep.execute.gather import receive_state, send_state
from everstep.execute.links import Links
from everstep.execute.split import StageModule
from everstep.execute.stage import Stage
from everstep.execute.timing import Profiler
from everstep.execute.update import Update
from everstep.membership.messages import ClipMode
from everstep.schedule.actions import Action
from everstep.training.guide import Guide, Orders
from everstep.training.job import Job

HALT_WITHIN_S = 30.0
"""A peer's connection may break before the coordinator's word arrives; it must by then."""

LEAVE_WITHIN_S = 10.0

Result = TypeVar("Result")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What this worker has and keeps from generation to generation."""

    job: Job
    me: WorkerId
    replicas: int
    stage: Stage
    update: Update
    fetcher: Fetcher | None
    stages: list[StageModule]
    """All of the model's, for the names of what the others hold."""


class Connect(Protocol):
    def __call__(self, orders: Orders) -> Links:
        """Connects to the peers of a generation."""


class _Pace:
    def __init__(self, orders: Orders, guide: Guide) -> None:
        self._orders = orders
        self._guide = guide

    def check(self) -> None:
        self._orders.lifetime.check()

    def wait_watermark(self, step: int) -> None:
        self._guide.wait_watermark(step)


class Run:
    """Iterate over it to train; evaluate or take the weights between steps."""

    def __init__(
        self, holding: Holding, guide: Guide, connect: Connect, *, steps: int, clock: Clock
    ) -> None:
        self.steps = steps
        self._holding = holding
        self._guide = guide
        self._connect = connect
        self._clock = clock
        self._finished_step = -1
        self._is_over = False
        self._links: Links | None = None
        self._begin(guide.next_orders())

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._is_over:
            raise StopIteration
        if self._next_step == self.steps:
            # The last step stands only when everybody has finished it.
            self._uninterrupted(lambda: None)
            self._finish()
            raise StopIteration
        while True:
            try:
                return self._train_one(self._next_step)
            except (GenerationEnded, PeerLost) as interruption:
                self._change_generation(interruption)

    @property
    def is_reporter(self) -> bool:
        """Whether this is the one live worker that speaks for all."""
        return self._holding.me == self._lead(self._holding.stage.num_stages - 1)

    def evaluate(self, dataset: Dataset) -> dict[str, float]:
        """The mean loss and metrics over `dataset`, without training. Call it on every worker."""
        holding, job = self._holding, self._holding.job

        def operation() -> dict[str, float]:
            evaluation = Evaluation(
                holding.stage,
                self._connected,
                microbatch_size=job.batch_size // (holding.replicas * job.microbatches),
                replicas=holding.replicas,
                microbatches=job.microbatches,
                metrics=list(job.metrics),
            )
            return evaluation.run(dataset, self._actions)

        return self._uninterrupted(operation)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's, with the keys of `job.model()`, on the reporter; empty on the others.
        Call it on every worker."""
        return self._uninterrupted(self._gather)

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

    def _meet(self) -> None:
        """Returns when every worker is here."""
        nothing = torch.zeros(1, device=self._holding.stage.device)
        self._connected.world.all_reduce(nothing).wait(LEAVE_WITHIN_S)

    def _finish(self) -> None:
        if not self._is_over:
            self._guide.report_finished()
            self._is_over = True

    @property
    def _next_step(self) -> int:
        return self._finished_step + 1

    @property
    def _connected(self) -> Links:
        assert self._links is not None, "the run is closed"
        return self._links

    def _lead(self, stage: int) -> WorkerId:
        return self._orders.members_of(stage)[0]

    def _train_one(self, step: int) -> Step:
        replanned = self._guide.take_replan(step)
        if replanned is not None:
            self._follow(replanned, first_step=step)
        report = self._executor.run(step, self._actions)
        self._finished_step = step
        self._guide.report_step(report)
        self._profiler.add(report.times)
        if self._profiler.num_steps == self._orders.profile_steps:
            self._guide.report_profile(self._profiler)
        return Step(
            index=step,
            loss=report.loss,
            metrics=report.metrics,
            seconds=report.seconds,
            is_reporter=self.is_reporter,
        )

    def _gather(self) -> dict[str, Tensor]:
        holding, links = self._holding, self._connected
        stages = range(holding.stage.num_stages)
        reporter = self._lead(stages[-1])
        if holding.me != reporter:
            if holding.me == self._lead(holding.me.stage):
                assert links.channels is not None
                send_state(holding.stage.module, links.channels, to=reporter)
            return {}
        others = {
            self._lead(stage): list(holding.stages[stage].names.values()) for stage in stages[:-1]
        }
        found: dict[str, Tensor] = {}
        if others:
            assert links.channels is not None
            found = receive_state(links.channels, others)
        found |= holding.stage.module.state_dict()
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}

    def _uninterrupted(self, operation: Callable[[], Result]) -> Result:
        """Does something between steps, when everybody has finished the last one."""
        while True:
            try:
                self._guide.wait_watermark(self._finished_step)
                return operation()
            except (GenerationEnded, PeerLost) as interruption:
                self._change_generation(interruption)

    def _change_generation(self, interruption: EverstepError) -> None:
        lifetime = self._orders.lifetime
        if not lifetime.has_ended:
            lifetime.pause(HALT_WITHIN_S)
        if not lifetime.has_ended:
            raise interruption
        if self._links is not None:
            self._links.close()
            self._links = None
        self._holding.stage.abandon()
        self._guide.report_halted(self._finished_step)
        self._begin(self._guide.next_orders())

    def _begin(self, orders: Orders) -> None:
        """Connects for a generation, and for the next when that one ends meanwhile."""
        holding, job = self._holding, self._holding.job
        self._orders = orders
        if orders.redo is not None:
            holding.update.redo(scale=orders.redo.scale)
        self._profiler = Profiler()
        self._follow(orders.actions, first_step=orders.step)
        try:
            self._links = self._connect(orders)
        except (GenerationEnded, PeerLost) as interruption:
            self._change_generation(interruption)
            return
        clipping = None
        if job.clip_norm is not None:
            is_late = job.clip_mode is ClipMode.POST_VALIDATED and orders.meeting is not None
            clipping = Clipping(norm=job.clip_norm, is_post_validated=is_late)
        self._executor = Executor(
            holding.stage,
            holding.update,
            links=self._links,
            pace=_Pace(orders, self._guide),
            fetcher=holding.fetcher,
            num_microbatches=holding.replicas * job.microbatches,
            clipping=clipping,
            clock=self._clock,
        )

    def _follow(self, actions: tuple[Action, ...], *, first_step: int) -> None:
        self._actions = actions
        if self._holding.fetcher is not None:
            self._holding.fetcher.expect(upcoming(actions, first_step=first_step))
