"""A worker's log, in the words of the executor: what it sent, and how its gradients were scaled.

Knows which boundaries need logging and in which attempt a step is run; `BoundaryLog` keeps the
bytes. Everything before the newest durable checkpoint is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from everstep.execute.data import Microbatch
from everstep.execute.replay import Sent
from everstep.membership.facts import LogDirection, LogRun
from everstep.recovery.log import BoundaryLog, LogKey, LogReport
from everstep.schedule.actions import Kind


class StageLog:
    def __init__(self, log: BoundaryLog, *, microbatches: int) -> None:
        """`microbatches`: per replica."""
        self.scales: dict[int, float] = {}
        """How far the gradients of a step were scaled, where they were."""

        self.step_bytes = dict.fromkeys(LogDirection, 0)
        """Sent in the last whole step, logged or not."""

        self._log = log
        self._microbatches = microbatches
        self._attempt = 0
        self._unlogged: frozenset[int] = frozenset()
        self._durable_step = -1
        self._counted: dict[LogDirection, int] = {}

    def begin(self, *, attempt: int, unlogged: Sequence[int]) -> None:
        """`attempt`: the generation. `unlogged`: boundaries that need no log."""
        self._attempt = attempt
        self._unlogged = frozenset(unlogged)

    def tend(self, *, durable_step: int, unlogged: Sequence[int]) -> None:
        """After each step: what needs no log any more."""
        self.step_bytes |= self._counted
        self._counted = {}
        self._unlogged = frozenset(unlogged)
        if durable_step > self._durable_step:
            self._durable_step = durable_step
            self._log.collect(durable_step)
            self.scales = {s: scale for s, scale in self.scales.items() if s > durable_step}

    def sent(
        self, mb: Microbatch, kind: Kind, stage: int, tensors: Sequence[Tensor], structure: str
    ) -> None:
        key = self._key(mb, kind, stage, attempt=self._attempt)
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._counted[key.direction] = self._counted.get(key.direction, 0) + num_bytes
        if key.boundary not in self._unlogged:
            self._log.record(key, tensors, structure)

    def keeps(self, kind: Kind, stage: int) -> bool:
        """Whether what `stage` sends by such actions is logged at all."""
        return _boundary(kind, stage) not in self._unlogged

    def sent_again(self, attempt: int) -> Sent:
        """For a replay: what is still logged from the first time stays."""

        def sent(
            mb: Microbatch, kind: Kind, stage: int, tensors: Sequence[Tensor], structure: str
        ) -> None:
            key = self._key(mb, kind, stage, attempt=attempt)
            if key.boundary not in self._unlogged:
                self._log.record(key, tensors, structure, replace=False)

        return sent

    def _key(self, mb: Microbatch, kind: Kind, stage: int, *, attempt: int) -> LogKey:
        is_forward = kind is Kind.FORWARD
        return LogKey(
            step=mb.step,
            attempt=attempt,
            microbatch=mb.replica * self._microbatches + mb.number,
            boundary=_boundary(kind, stage),
            direction=LogDirection.FORWARD if is_forward else LogDirection.BACKWARD,
        )

    def runs(self) -> tuple[LogRun, ...]:
        return self._log.runs()

    def report(self) -> LogReport:
        return self._log.report()

    def read(self, key: LogKey) -> tuple[list[Tensor], str]:
        return self._log.read(key)

    def close(self) -> None:
        self._log.close()


def _boundary(kind: Kind, stage: int) -> int:
    """That which is crossed by what `stage` sends."""
    return stage if kind is Kind.FORWARD else stage - 1
