"""Sums a stage's gradients over its live workers, bucket by bucket, while W still runs.

Every worker starts the same reductions in the same order, whatever order its parameters become
final in: a bucket waits for those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from everstep.comm.group import Group, Work
from everstep.core.points import Point, passing
from everstep.execute.buckets import GradientBuckets

REDUCE_WITHIN_S = 600.0


class Reduction:
    """Of one step. `note` is given to the last W; `finish` waits for the sums."""

    def __init__(self, buckets: GradientBuckets, group: Group, *, step: int) -> None:
        self._buckets = buckets
        self._group = group
        self._step = step
        self._missing = Counter(buckets.bucket_of(param) for param in buckets.params)
        self._works: list[Work] = []

    def note(self, param: Parameter) -> None:
        """The parameter's gradient is final on this worker."""
        self._missing[self._buckets.bucket_of(param)] -= 1
        while len(self._works) < len(self._buckets.buckets):
            number = len(self._works)
            if self._missing[number]:
                return
            self._buckets.seal(number)
            passing(Point.BEFORE_REDUCTION, step=self._step)
            self._works.append(self._group.all_reduce(self._buckets.buffers[number]))

    def finish(self) -> None:
        assert len(self._works) == len(self._buckets.buckets), "W has not told of every parameter"
        passing(Point.IN_REDUCTION, step=self._step)
        for work in self._works:
            work.wait(REDUCE_WITHIN_S)
        passing(Point.AFTER_REDUCTION, step=self._step)
        self._buckets.drop_unused()


class Sum:
    """Adds up a few numbers over a group; every member gets the same bits."""

    def __init__(self, group: Group, numbers: Sequence[float]) -> None:
        self._total: Tensor = torch.tensor(numbers, dtype=torch.float64)
        self._work = group.all_reduce(self._total)

    def finish(self) -> list[float]:
        self._work.wait(REDUCE_WITHIN_S)
        return [float(value) for value in self._total.tolist()]


def sum_over(group: Group, numbers: Sequence[float]) -> list[float]:
    return Sum(group, numbers).finish()
