"""Groups over gloo, which can be freed although gloo's own `abort()` does nothing.

What frees a blocked gloo operation is the end of the connections it waits on. So a group keeps
duplicates of its sockets from the moment it is made, and `poison` shuts them down. Duplicates,
because gloo closes descriptors by itself and the numbers are reused for others; never the listening
socket, because gloo ends the process when that breaks.

    member a                     store                     member b
       | "I listen on port 7" --->|<--- "I listen on port 9" |
       |<-------- all are here ---|---- all are here ------->|
       |=================== gloo connects ===================|

The first exchange waits for members that are late and can be ended at any moment. It also tells
which sockets of the process are this group's: those from or to one of the ports announced in it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from everstep.comm.group import Group, SoloGroup, Work
from everstep.comm.lifetime import Lifetime
from everstep.comm.sockets import Ports, connected_to, hung_up, listening_ports, own_sockets
from everstep.comm.store import StoreAddress, connect_store
from everstep.comm.streams import cut
from everstep.core.errors import (
    GenerationEnded,
    PeerLost,
    PeerSilent,
    StoreUnreachable,
)
from everstep.core.ids import WorkerId

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_OPERATION_S = 24 * 3600.0
"""gloo's own limit on an operation. Ours is the one given to `wait`; after it, nothing is broken."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02

# Which sockets a new gloo device opens can only be told by looking before and after, so one at a time.
_device_lock = threading.Lock()


def form_gloo(
    *,
    store: StoreAddress,
    generation: int,
    name: str,
    me: WorkerId,
    members: Sequence[WorkerId],
    timeout_s: float,
    host: str | None = None,
    lifetime: Lifetime | None = None,
) -> Group:
    """Meets the other members and connects to them; every member must name the same ones in order.

    `host` is the address of ours to listen on; by default the one that reaches the store, so a job
    on loopback opens no port beyond it. An end of `lifetime` frees this call and later the group.
    """
    lifetime = lifetime or Lifetime(generation)
    lifetime.check()
    if len(members) == 1:
        solo = SoloGroup(generation=generation, me=me)
        lifetime.on_end(solo.poison)
        return solo
    forming = _Forming(
        store=store,
        prefix=f"{generation}/{name}",
        me=me,
        members=tuple(members),
        deadline_s=time.monotonic() + timeout_s,
        lifetime=lifetime,
    )
    group = forming.form(host or _address_towards(store))
    lifetime.on_end(group.poison)
    return group


class GlooGroup:
    def __init__(
        self,
        group: Any,
        *,
        generation: int,
        members: tuple[WorkerId, ...],
        rank: int,
        sockets: Sequence[tuple[socket.socket, WorkerId | None]],
    ) -> None:
        self.members = members
        self.rank = rank
        self._generation = generation
        self._group = group
        self._sockets = sockets
        self._lock = threading.Lock()
        self._is_poisoned = False
        self._is_closed = False

    def all_reduce(self, tensor: Tensor) -> Work:
        self.check()
        return _GlooWork(self, self._group.allreduce([tensor]), tensor, name="all-reduce")

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        from torch._C._distributed_c10d import BroadcastOptions

        self.check()
        options = BroadcastOptions()
        options.rootRank = source
        return _GlooWork(self, self._group.broadcast([tensor], options), tensor, name="broadcast")

    def poison(self) -> None:
        with self._lock:
            self._is_poisoned = True
            if not self._is_closed:
                for each, _ in self._sockets:
                    cut(each)

    def close(self) -> None:
        self.poison()
        with self._lock:
            self._is_closed = True
            for each, _ in self._sockets:
                each.close()
        # gloo's destructor waits for operations under way; they have just been cut.
        self._group = None

    def check(self) -> None:
        if self._is_poisoned:
            raise GenerationEnded(self._generation)

    def others(self) -> list[WorkerId]:
        return [worker for place, worker in enumerate(self.members) if place != self.rank]

    def suspects(self) -> list[WorkerId]:
        """Whose connection has ended; all it can be, where the connection does not tell."""
        with self._lock:
            broken = {
                worker for each, worker in self._sockets if not self._is_closed and hung_up(each)
            }
        known = {worker for _, worker in self._sockets if worker is not None}
        nameless = [worker for worker in self.others() if worker not in known]
        found = [worker for worker in self.others() if worker in broken]
        return found + (nameless if None in broken else []) or self.others()


class _GlooWork:
    def __init__(self, group: GlooGroup, work: Any, tensor: Tensor, *, name: str) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # gloo reads and writes its memory until the work is done.
        self._name = name

    def wait(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._group.check()
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                others = self._group.others()
                raise PeerSilent(others, awaited=f"an {self._name}", waited_s=waited_s) from error
            cause = str(error).partition("\n")[0]
            raise PeerLost(self._group.suspects(), during=self._name, cause=cause) from error
        self._group.check()


class _Forming:
    """A group on its way. Whatever it waits for, the end of the lifetime frees it."""

    def __init__(
        self,
        *,
        store: StoreAddress,
        prefix: str,
        me: WorkerId,
        members: tuple[WorkerId, ...],
        deadline_s: float,
        lifetime: Lifetime,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._members = members
        self._rank = members.index(me)
        self._began_s = time.monotonic()
        self._deadline_s = deadline_s
        self._lifetime = lifetime
        self._ports = Ports()

    def form(self, host: str) -> GlooGroup:
        from torch._C._distributed_c10d import PrefixStore

        client = connect_store(self._store, timeout_s=self._left_s())
        meeting = PrefixStore(self._prefix, client)
        try:
            device = self._listen(host)
            self._meet(meeting)
            with self._lifetime.freeing(self._cut):
                group = self._connect(meeting, device)
        except RuntimeError as error:
            raise self._explain(error) from error
        return GlooGroup(
            group,
            generation=self._lifetime.generation,
            members=self._members,
            rank=self._rank,
            sockets=connected_to(self._ports),
        )

    def _listen(self, host: str) -> Any:
        from torch._C._distributed_c10d import ProcessGroupGloo

        with _device_lock:
            before = own_sockets()
            device = ProcessGroupGloo.create_device(hostname=host)
            self._ports.ours = listening_ports(since=before)
        return device

    def _meet(self, meeting: Store) -> None:
        """Tells the others our port and waits until all have told theirs."""
        keys = [f"port/{rank}" for rank in range(len(self._members))]
        meeting.set(keys[self._rank], ",".join(str(port) for port in self._ports.ours))
        pause_s = _FIRST_PAUSE_S
        while not meeting.check(keys):
            # Asking again is quiet and can be ended; a wait inside torch's client is neither.
            self._lifetime.pause(pause_s)
            self._lifetime.check()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._left_s() <= 0:
                raise self._silent([key for key in keys if not meeting.check([key])])
        for worker, value in zip(self._members, meeting.multi_get(keys), strict=True):
            if worker != self._members[self._rank]:
                self._ports.theirs |= {int(port): worker for port in value.decode().split(",")}

    def _connect(self, meeting: Store, device: Any) -> Any:
        from torch._C._distributed_c10d import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001
        options._devices = [device]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = timedelta(seconds=max(self._left_s(), 0.1))  # noqa: SLF001
        group = ProcessGroupGloo(meeting, self._rank, len(self._members), options)
        group._set_default_timeout(timedelta(seconds=_OPERATION_S))  # noqa: SLF001
        return group
