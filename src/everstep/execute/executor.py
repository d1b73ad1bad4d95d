"""Runs a worker's actions, step after step: receive, compute, send; then reduce and update.

The order of the list is all it follows; planned times are for planning. Knows nothing of who else
is alive: when the generation ends, whatever it waits for raises, and the caller decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from torch import Tensor

from everstep.comm.channels import Channels
from everstep.comm.reading import Message
from everstep.core.clock import Clock
from everstep.core.ids import WorkerId
from everstep.core.points import Point, passing
from everstep.execute import timing
from everstep.execute.boundary import flatten, with_gaps, without_gaps
from everstep.execute.data import Fetcher, Microbatch
from everstep.execute.links import DIRECTIONS, Links
from everstep.execute.reduction import Reduction, Sum
from everstep.execute.stage import Stage
from everstep.execute.timing import StepTimes
from everstep.execute.update import Update
from everstep.schedule.actions import Action, Kind

RECEIVE_WITHIN_S = 600.0
"""The coordinator notices a stuck step long before; this is the last resort."""


Results = tuple[float | None, dict[str, float]]
"""A loss and metrics by name."""


class Pace(Protocol):
    """How far the coordinator lets this worker go."""

    def check(self) -> None:
        """Raises GenerationEnded when the generation is over."""

    def wait_watermark(self, step: int) -> None:
        """Returns when every live worker has finished `step`."""

    def before_update(self) -> None:
        """Returns when nothing else still reads the parameters."""


class SendLog(Protocol):
    def sent(
        self, mb: Microbatch, kind: Kind, stage: int, tensors: Sequence[Tensor], structure: str
    ) -> None:
        """Keeps what `stage` has sent, should the receiver have to be rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping:
    norm: float
    is_post_validated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    step: int
    times: StepTimes
    seconds: float
    loss: float | None
    """The mean over the whole batch; only the last stage knows it."""

    metrics: dict[str, float]
    norm_squared: float | None


class Executor:
    """Of one worker in one generation."""

    def __init__(
        self,
        stage: Stage,
        update: Update,
        *,
        links: Links,
        pace: Pace,
        fetcher: Fetcher | None,
        num_microbatches: int,
        clipping: Clipping | None,
        clock: Clock,
        log: SendLog | None = None,
    ) -> None:
        """`num_microbatches`: of the whole batch. `fetcher`: for the first and the last stage."""
        self._stage = stage
        self._update = update
        self._links = links
        self._pace = pace
        self._fetcher = fetcher
        self._num_microbatches = num_microbatches
        self._clipping = clipping
        self._clock = clock
        self._log = log

    def run(self, step: int, actions: Sequence[Action], *, is_profiled: bool = False) -> StepReport:
        """`is_profiled`: an action's time is that until its device is done, not until it has been
        given to the device."""
        times = StepTimes(self._clock, settle=self._stage.settle if is_profiled else None)
        num_weights_left = sum(action.kind is Kind.WEIGHT_GRADIENT for action in actions)
        is_begun = False
        reduction = Reduction(self._stage.buckets, self._links.stage, step=step)
        for action in actions:
            self._pace.check()
            mb = Microbatch(step, action.replica, action.microbatch)
            match action.kind:
                case Kind.FORWARD:
                    self._forward(mb, action, times)
                case Kind.INPUT_GRADIENT:
                    self._backward_input(mb, action, times)
                case Kind.WEIGHT_GRADIENT:
                    if not is_begun:
                        self._begin_gradients(step, times)
                        is_begun = True
                    num_weights_left -= 1
                    on_ready = None if num_weights_left else reduction.note
                    with times.measure(timing.WEIGHT_GRADIENT):
                        self._stage.backward_weight(mb, on_ready=on_ready)
        with times.measure(timing.REDUCTION):
            finish_results = self._begin_results(step)
            reduction.finish()
            loss, metrics = finish_results()
        with times.measure(timing.OPTIMIZER):
            norm_squared = self._step_optimizer(step)
        return StepReport(
            step=step,
            times=times,
            seconds=times.elapsed_s,
            loss=loss,
            metrics=metrics,
            norm_squared=norm_squared,
        )

    def _forward(self, mb: Microbatch, action: Action, times: StepTimes) -> None:
        inputs, structure, target = self._inputs(mb, action, times)
        with times.measure(timing.FORWARD):
            outputs, shape = self._stage.forward(mb, inputs, structure, target)
        if action.sends_to is not None:
            self._send(mb, action, outputs, shape)

    def _inputs(
        self, mb: Microbatch, action: Action, times: StepTimes
    ) -> tuple[Sequence[Tensor], str, object]:
        given = target = None
        if self._fetcher is not None:
            with times.measure(timing.DATA):
                given, target = self._fetcher.take(mb)
        if action.receives_from is None:
            return *flatten(given), target
        with times.measure(timing.PEERS):
            message = self._receive(mb, action, action.receives_from)
        return message.tensors, message.structure, target

    def _backward_input(self, mb: Microbatch, action: Action, times: StepTimes) -> None:
        gradients: Sequence[Tensor | None] = ()
        if action.receives_from is not None:
            with times.measure(timing.PEERS):
                message = self._receive(mb, action, action.receives_from)
            gradients = with_gaps(message.tensors, message.structure)
        with times.measure(timing.INPUT_GRADIENT):
            found = self._stage.backward_input(mb, gradients)
        if action.sends_to is not None:
            self._send(mb, action, *without_gaps(found))

    def _receive(self, mb: Microbatch, action: Action, peer: WorkerId) -> Message:
        passing(Point.BEFORE_RECEIVE, step=mb.step)
        message = self._channels.receive(
            peer, DIRECTIONS[action.kind], _key(mb, action), timeout_s=RECEIVE_WITHIN_S
        )
        passing(Point.AFTER_RECEIVE, step=mb.step)
        return message

    def _send(
        self, mb: Microbatch, action: Action, tensors: Sequence[Tensor], structure: str
    ) -> None:
        peer: WorkerId | None = action.sends_to
        assert peer is not None
        passing(Point.BEFORE_SEND, step=mb.step)
        self._channels.send(peer, DIRECTIONS[action.kind], _key(mb, action), tensors, structure)
        if self._log is not None:
            self._log.sent(mb, action.kind, action.stage, tensors, structure)
        passing(Point.AFTER_SEND, step=mb.step)

    def _begin_gradients(self, step: int, times: StepTimes) -> None:
        """The gradients of the last step are kept until nobody can ask to undo it any more."""
        with times.measure(timing.WATERMARK):
            self._pace.wait_watermark(step - 1)
        self._stage.buckets.begin()

    def _begin_results(self, step: int) -> Callable[[], Results]:
        """The loss and metrics of the whole batch, on every worker of the last stage. They are
        summed while the gradients still are."""
        results = self._stage.take_results(step)
        if not self._stage.is_last:
            return lambda: (None, {})
        # In the order of micro-batches, not of running: a sum of floats depends on it.
        ordered = [results[mb] for mb in sorted(results)]
        names = list(ordered[0].metrics)
        numbers = [sum(result.loss for result in ordered)]
        numbers += [sum(result.metrics[name] for result in ordered) for name in names]
        totals = Sum(self._links.stage, numbers)

        def finish() -> Results:
            loss, *metrics = (total / self._num_microbatches for total in totals.finish())
            return loss, dict(zip(names, metrics, strict=True))

        return finish

    def _step_optimizer(self, step: int) -> float | None:
        clipping = self._clipping
        norm_squared = None
        if clipping is not None and clipping.is_post_validated:
            norm_squared = self._update.norm_squared()
        elif clipping is not None:
            self._update.clip(
                step,
                clip_norm=clipping.norm,
                world=self._links.world,
                num_in_stage=len(self._links.stage.members),
            )
        passing(Point.BEFORE_OPTIMIZER, step=step)
        self._pace.before_update()
        self._update.step()
        passing(Point.AFTER_OPTIMIZER, step=step)
        return norm_squared

    @property
    def _channels(self) -> Channels:
        assert self._links.channels is not None, "a worker without peers has no channels"
        return self._links.channels


def upcoming(actions: Sequence[Action], *, first_step: int) -> Iterator[Microbatch]:
    """The micro-batches whose data a worker will want, in order, without end."""
    for step in count(first_step):
        for action in actions:
            if action.kind is Kind.FORWARD:
                yield Microbatch(step, action.replica, action.microbatch)


def _key(mb: Microbatch, action: Action) -> str:
    """Compared at both ends, so that a channel out of order is noticed at once."""
    return f"{mb.step} {action.kind} {mb.replica}.{mb.number}"
