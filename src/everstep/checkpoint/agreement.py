"""All ranks save at the same step and leave at the same step; rank 0 says when.

With several ranks, what is wished after one step is acted upon after the next: the word of rank 0
travels while the step runs, on a group of its own, so nobody waits for it. Room for a copy that is
there after one step is still there after the next, so what was agreed on can be done by all.

    rank 0   step 7 | wish: save          step 8 | saves 8
    rank 1   step 7 | no wish             step 8 | saves 8

A signal that any rank has received counts as a wish of all. Only numbers travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from everstep.core.errors import WaitTimedOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    should_save: bool = False
    is_busy: bool = False
    """There is no room for another copy: nobody saves, or the others would wait for this part."""

    signal: int | None = None


class Agreement(Protocol):
    rank: int
    size: int

    def agree(self, wish: Callable[[], Wish]) -> Wish:
        """Called by all ranks after every step; the same answer on each. It does not wait."""
        ...

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank. Waits for everybody."""
        ...

    def share(self, number: int) -> int:
        """The number that rank 0 gave. Waits for everybody."""
        ...

    def close(self) -> None: ...


class Alone:
    rank = 0
    size = 1

    def agree(self, wish: Callable[[], Wish]) -> Wish:
        wished = wish()
        return replace(wished, should_save=wished.should_save and not wished.is_busy)

    def any(self, is_so: bool) -> bool:
        return is_so

    def share(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass


class Together:
    """Over a gloo group, whatever the gradients travel on: its waits block no device."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._word = torch.zeros(3, dtype=torch.int64)
        self._under_way: dist.Work | None = None

    def agree(self, wish: Callable[[], Wish]) -> Wish:
        agreed = self._hear()
        wished = wish()
        # What is agreed on now is done now: it is not wished once more.
        should_save = wished.should_save and not agreed.should_save
        self._word = torch.tensor([should_save, wished.is_busy, wished.signal or 0])
        self._under_way = dist.all_reduce(
            self._word, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def any(self, is_so: bool) -> bool:
        word = torch.tensor([int(is_so)])
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._group)
        return bool(word[0])

    def share(self, number: int) -> int:
        word = torch.tensor([number])
        dist.broadcast(word, group=self._group, group_src=0)
        return int(word[0])

    def close(self) -> None:
        if dist.is_initialized():
            self._hear()
            dist.destroy_process_group(self._group)

    def _hear(self) -> Wish:
        work, self._under_way = self._under_way, None
        if work is None:
            return Wish()
        began_s = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise WaitTimedOut(
                f"word on the next checkpoint ({error})",
                source=f"the other {self.size - 1} ranks",
                after_s=time.monotonic() - began_s,
            ) from error
        should_save, is_busy, signal = self._word.tolist()
        return Wish(should_save=bool(should_save and not is_busy), signal=signal or None)


def find_agreement() -> Agreement:
    """With the other ranks, when there is a process group of several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Together()
    return Alone()
