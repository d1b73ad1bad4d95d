"""Groups over NCCL, for stages on CUDA devices. torch's own `abort()` frees them.

torch.distributed is imported inside, because a build without NCCL must be able to load this file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from everstep.comm.group import Group, SoloGroup, Work, by_way_of
from everstep.comm.lifetime import Lifetime
from everstep.comm.store import StoreAddress, connect_store
from everstep.core.errors import GenerationEnded, PeerLost, PeerSilent
from everstep.core.ids import WorkerId

_OPERATION_S = 24 * 3600.0
"""NCCL's own limit; its watchdog ends the process, so ours, given to `wait`, must come first."""

_POLL_S = 0.0002


def form_nccl(
    *,
    store: StoreAddress,
    generation: int,
    name: str,
    me: WorkerId,
    members: Sequence[WorkerId],
    timeout_s: float,
    lifetime: Lifetime | None = None,
) -> Group:
    """Like `form_gloo`, on the process's current device. NCCL connects at the first operation."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupNCCL

    lifetime = lifetime or Lifetime(generation)
    lifetime.check()
    group: Group
    if len(members) == 1:
        group = SoloGroup(generation=generation, me=me)
    else:
        client = connect_store(store, timeout_s=timeout_s)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_OPERATION_S)
        rank = list(members).index(me)
        backend = ProcessGroupNCCL(
            PrefixStore(f"{generation}/{name}", client), rank, len(members), options
        )
        group = NcclGroup(backend, generation=generation, members=tuple(members), rank=rank)
    lifetime.on_end(group.poison)
    return group


class NcclGroup:
    def __init__(
        self, group: Any, *, generation: int, members: tuple[WorkerId, ...], rank: int
    ) -> None:
        self.members = members
        self.rank = rank
        self.ended = threading.Event()
        self._generation = generation
        self._group = group
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._lock = threading.Lock()

    def all_reduce(self, tensor: Tensor) -> Work:
        self.check()
        if not tensor.is_cuda:
            return by_way_of(self._device, tensor, self.all_reduce)
        return _NcclWork(self, self._group.allreduce([tensor]), tensor, name="all-reduce")

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        from torch._C._distributed_c10d import BroadcastOptions

        self.check()
        if not tensor.is_cuda:
            return by_way_of(self._device, tensor, lambda copy: self.broadcast(copy, source=source))
        options = BroadcastOptions()
        options.rootRank = source
        return _NcclWork(self, self._group.broadcast([tensor], options), tensor, name="broadcast")

    def poison(self) -> None:
        with self._lock:
            if not self.ended.is_set():
                self.ended.set()
                self._group.abort()

    def close(self) -> None:
        self.poison()
        self._group = None

    def check(self) -> None:
        if self.ended.is_set():
            raise GenerationEnded(self._generation)

    def others(self) -> list[WorkerId]:
        return [worker for place, worker in enumerate(self.members) if place != self.rank]


class _NcclWork:
    def __init__(self, group: NcclGroup, work: Any, tensor: Tensor, *, name: str) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor
        self._name = name

    def wait(self, timeout_s: float) -> None:
        # The device runs on its own: polling keeps this thread free to hear the generation's end.
        deadline_s = time.monotonic() + timeout_s
        while not self._is_completed():
            self._group.ended.wait(_POLL_S)
            self._group.check()
            if time.monotonic() > deadline_s:
                awaited = f"an {self._name}"
                raise PeerSilent(self._group.others(), awaited=awaited, waited_s=timeout_s)
        self._group.check()
        self._work.wait()  # Orders the current stream after the result.

    def _is_completed(self) -> bool:
        try:
            return bool(self._work.is_completed())
        except RuntimeError as error:
            self._group.check()
            cause = str(error).partition("\n")[0]
            raise PeerLost(self._group.others(), during=self._name, cause=cause) from error
