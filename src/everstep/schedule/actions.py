"""Actions: the F, B and W that a step is made of.

F  forward of one micro-batch through one stage
B  gradient of the stage's input
W  gradient of the stage's weights

The same micro-batch runs F, B and W of a stage on the same worker, because that worker holds its
activations. Which worker that is, the route says (see routing.py).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from everstep.core.ids import WorkerId


class Kind(StrEnum):
    FORWARD = "F"
    INPUT_GRADIENT = "B"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One F, B or W of one micro-batch on one worker, with the peers it talks to. A tuple, because
    plans have tens of thousands, and a frozen dataclass takes three times as long to make."""

    kind: Kind
    stage: int
    replica: int
    """The replica the micro-batch belongs to; another one than the worker's when it is adopted."""

    microbatch: int
    worker: WorkerId
    receives_from: WorkerId | None
    """Sends the activation (F) or the output gradient (B). None at the ends and for W."""

    sends_to: WorkerId | None
    start: float
    end: float
    """Planned, in the unit of the durations. The executor follows the order, not the times."""

    @property
    def is_adopted(self) -> bool:
        return self.replica != self.worker.replica

    def __str__(self) -> str:
        """`F2.5@1:3` is the forward of micro-batch 5 of replica 2 on worker 1:3."""
        return f"{self.kind}{self.replica}.{self.microbatch}@{self.worker}"
