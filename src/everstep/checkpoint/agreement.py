"""All ranks save at the same step and leave at the same step; rank 0 says when.

With several ranks, what is wished after one step is acted upon after the next: the word of rank 0
travels while the step runs, on a group of its own, so nobody waits for it.

    rank 0   step 7 | wish: save          step 8 | saves 8
    rank 1   step 7 | no wish             step 8 | saves 8

A signal that any rank has received counts as a wish of all. Numbers only travel: nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from everstep.core.errors import WaitTimedOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    should_save: bool = False
    signal: int | None = None


class Agreement(Protocol):
    rank: int
    size: int

    def agree(self, wish: Wish) -> Wish:
        """Called by all ranks after every step; the same answer on each."""
        ...

    def share(self, number: int) -> int:
        """The number that rank 0 gave. Waits for everybody."""
        ...

    def close(self) -> None: ...


class Alone:
    rank = 0
    size = 1

    def agree(self, wish: Wish) -> Wish:
        return wish

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
        self._word = torch.zeros(2, dtype=torch.int64)
        self._under_way: dist.Work | None = None

    def agree(self, wish: Wish) -> Wish:
        agreed = self._hear()
        self._word = torch.tensor([wish.should_save, wish.signal or 0], dtype=torch.int64)
        self._under_way = dist.all_reduce(
            self._word, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def share(self, number: int) -> int:
        word = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(word, src=dist.get_global_rank(self._group, 0), group=self._group)
        return int(word[0])

    def close(self) -> None:
        if dist.is_initialized():
            self._hear()
            dist.destroy_process_group(self._group)

    def _hear(self) -> Wish:
        work, self._under_way = self._under_way, None
        if work is None:
            return Wish()
        try:
            work.wait()
        except RuntimeError as error:
            raise WaitTimedOut(
                f"word on the next checkpoint ({error})",
                source=f"the other {self.size - 1} ranks",
                after_s=_timeout_s(),
            ) from error
        should_save, signal = self._word.tolist()
        return Wish(should_save=bool(should_save), signal=signal or None)


def find_agreement() -> Agreement:
    """With the other ranks, when there is a process group of several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Together()
    return Alone()


def _timeout_s() -> float:
    return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
