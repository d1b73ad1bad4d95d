"""Runs steps of a few adjacent stages again, on one worker, from what was logged at their ends.

    logged activation --> F of the first stage --> ... --> F of the last stage
                          B and W of the first <-- ... <-- B and W of the last <-- logged gradient

One micro-batch after the other, so there are no bubbles and few activations. Nothing is sent. The
same data, randomness and order of summation as the first time: a replayer that runs all
micro-batches ends with the very bits that were lost. Does not know where logs lie or who else
replays; those who share the micro-batches sum their gradients in `group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from everstep.comm.group import Group
from everstep.execute.boundary import flatten, with_gaps, without_gaps
from everstep.execute.data import Fetcher, Microbatch
from everstep.execute.reduction import Reduction, sum_over
from everstep.execute.stage import Result, Stage
from everstep.execute.update import Update
from everstep.schedule.actions import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stage of the range, with its optimizer."""

    stage: Stage
    update: Update


class Logged(Protocol):
    """What entered the range at its two ends."""

    def activation(self, mb: Microbatch) -> tuple[Sequence[Tensor], str]: ...

    def gradient(self, mb: Microbatch) -> tuple[Sequence[Tensor], str]: ...


class Sent(Protocol):
    def __call__(
        self, mb: Microbatch, kind: Kind, stage: int, tensors: Sequence[Tensor], structure: str
    ) -> None:
        """What `stage` sent to its neighbour when it ran the action the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """Of the whole batch."""

    loss: float | None = None
    """None when the last stage is not in the range."""

    metrics: dict[str, float] = field(default_factory=dict)


class Replayer:
    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        logged: Logged,
        fetcher: Fetcher | None,
        group: Group,
        on_sent: Sent,
        check: Callable[[], None],
    ) -> None:
        """`fetcher`: for ranges with the first or the last stage. `check` raises when it is all
        over, and is called between micro-batches."""
        self._pieces = pieces
        self._logged = logged
        self._fetcher = fetcher
        self._group = group
        self._on_sent = on_sent
        self._check = check

    def run(self, microbatches: Sequence[Microbatch], *, scale: Scale) -> None:
        """One step: `microbatches` are this worker's share of it, in order."""
        step = microbatches[0].step
        reductions = [
            Reduction(piece.stage.buckets, self._group, step=step) for piece in self._pieces
        ]
        for piece in self._pieces:
            piece.stage.buckets.begin()
        for mb in microbatches:
            self._check()
            self._forward(mb)
            self._backward(mb)
            is_last = mb == microbatches[-1]
            # The last stage first, on all replayers alike: their sums must meet in one order.
            for piece, reduction in zip(self._pieces[::-1], reductions[::-1], strict=True):
                piece.stage.backward_weight(mb, on_ready=reduction.note if is_last else None)
        for reduction in reductions[::-1]:
            reduction.finish()
        for piece in self._pieces:
            scale.step(piece.update)

    def result(self, step: int, *, num_microbatches: int) -> ReplayedStep:
        """The loss and metrics of `step`, summed over all who share it."""
        last = self._pieces[-1].stage
        found = last.take_results(step)
        if not last.is_last:
            return ReplayedStep()
        ordered = [found[mb] for mb in sorted(found)]
        names = list(ordered[0].metrics)
        loss, *metrics = (
            total / num_microbatches for total in sum_over(self._group, _sums(ordered, names))
        )
        return ReplayedStep(loss=loss, metrics=dict(zip(names, metrics, strict=True)))

    def _forward(self, mb: Microbatch) -> None:
        given = target = None
        if self._fetcher is not None:
            given, target = self._fetcher.take(mb)
        first = self._pieces[0].stage
        tensors: Sequence[Tensor]
        tensors, structure = flatten(given) if first.is_first else self._logged.activation(mb)
        for piece in self._pieces:
            tensors, structure = piece.stage.forward(mb, tensors, structure, target)
            if not piece.stage.is_last:
                self._on_sent(mb, Kind.FORWARD, piece.stage.index, tensors, structure)

    def _backward(self, mb: Microbatch) -> None:
        gradients: Sequence[Tensor | None] = ()
        if not self._pieces[-1].stage.is_last:
            gradients = with_gaps(*self._logged.gradient(mb))
        for piece in self._pieces[::-1]:
            gradients = piece.stage.backward_input(mb, gradients)
            if not piece.stage.is_first:
                kind = Kind.INPUT_GRADIENT
                self._on_sent(mb, kind, piece.stage.index, *without_gaps(gradients))


@dataclass(frozen=True, slots=True)
class Scale:
    """How a step's gradients were clipped when it was taken first."""

    factor: float | None = None
    """None: not at all."""

    is_post_validated: bool = False
    """The step was taken, undone, and taken again."""

    def step(self, update: Update) -> None:
        if self.factor is None:
            update.step()
        elif self.is_post_validated:
            update.step()
            update.redo(scale=self.factor)
        else:
            update.scale(self.factor)
            update.step()


def _sums(results: Sequence[Result], names: Sequence[str]) -> list[float]:
    numbers = [sum(result.loss for result in results)]
    return numbers + [sum(result.metrics[name] for result in results) for name in names]
