"""Groups: an ordered set of workers that reduce and broadcast together for one generation.

The seam between training code and transports; gloo.py and nccl.py are two files behind it. Every
member must call the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from everstep.core.errors import GenerationEnded
from everstep.core.ids import WorkerId


class Work(Protocol):
    """An operation under way."""

    def wait(self, timeout_s: float) -> None:
        """Returns when the tensor holds the result.

        Raises `GenerationEnded` when the group was poisoned, `PeerLost` when a member's connection
        broke and `PeerSilent` after `timeout_s`; the last one may be waited for again.
        """


class Group(Protocol):
    """Takes tensors of any device; those of its own kind are not copied."""

    @property
    def members(self) -> tuple[WorkerId, ...]: ...

    @property
    def rank(self) -> int:
        """Our place among the members."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sums over the members, in place. The tensor must be contiguous."""

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Overwrites the tensor with that of the member at place `source`."""

    def poison(self) -> None:
        """Frees every blocked wait with `GenerationEnded`. Idempotent, from any thread."""

    def close(self) -> None:
        """Poisons, then gives everything back. Idempotent."""


class SoloGroup:
    """The group of a worker that has no peer. Its sums and broadcasts are what they start from."""

    def __init__(self, *, generation: int, me: WorkerId) -> None:
        self.members: tuple[WorkerId, ...] = (me,)
        self.rank = 0
        self._generation = generation
        self._is_poisoned = False

    def all_reduce(self, tensor: Tensor) -> Work:
        del tensor
        return _SoloWork(self)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        del tensor
        assert source == 0, f"a group of one has no member {source}"
        return _SoloWork(self)

    def poison(self) -> None:
        self._is_poisoned = True

    def close(self) -> None:
        self.poison()

    def check(self) -> None:
        if self._is_poisoned:
            raise GenerationEnded(self._generation)


class _SoloWork:
    def __init__(self, group: SoloGroup) -> None:
        group.check()
        self._group = group

    def wait(self, timeout_s: float) -> None:
        del timeout_s
        self._group.check()


def by_way_of(device: torch.device, tensor: Tensor, operate: Callable[[Tensor], Work]) -> Work:
    """Operates on a copy on `device`; the result is in `tensor` when it was waited for."""
    copy = tensor.to(device)
    return _Brought(operate(copy), copy, tensor)


class _Brought:
    def __init__(self, work: Work, copy: Tensor, tensor: Tensor) -> None:
        self._work = work
        self._copy = copy
        self._tensor = tensor

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timeout_s)
        self._tensor.copy_(self._copy)
