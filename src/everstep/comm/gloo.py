"""Groups over gloo, which can be freed although gloo's own `abort()` does nothing.

What frees a blocked gloo operation is the end of the connections it waits on. So a group keeps
duplicates of its sockets from the moment it is made, and `poison` shuts them down. Duplicates,
because gloo closes descriptors by itself and the numbers are reused for others; never the listening
socket, because gloo ends the process when that breaks.

    member a                     store                     member b
       | "I listen at a:7" ----->|<----- "I listen at b:9" |
       |<-------- all are here ---|---- all are here ------->|
       |=================== gloo connects ===================|

The first exchange waits for members that are late and can be ended at any moment. It also tells
which sockets of the process are this group's: those at one of the addresses told in it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from everstep.comm.group import Group, SoloGroup, Work, by_way_of
from everstep.comm.lifetime import Lifetime
from everstep.comm.sockets import (
    Address,
    duplicates,
    has_hung_up,
    is_listening,
    local_address,
    open_sockets,
    peer_address,
)
from everstep.comm.store import StoreAddress, connect_store
from everstep.comm.streams import cut
from everstep.core.errors import (
    EverstepError,
    GenerationEnded,
    PeerLost,
    PeerSilent,
    StoreUnreachable,
)
from everstep.core.ids import WorkerId

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_OPERATION_S = 3600.0
"""gloo's own limit on an operation; it breaks the group. Ours, given to `wait`, does not."""

_LOOK_AGAIN_S = 0.1
"""A send that begins just as its connection is cut may never end: gloo loses the news (seen in
`UnboundBuffer::waitSend`, once in some hundred cuts). So nobody trusts gloo to say so alone."""

_DESTROY_WITHIN_S = 0.5

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02

_LEAST_CONNECT_S = 0.1

_HOST = torch.device("cpu")
"""CUDA tensors go by way of it: gloo's own sends of them were seen to hang (torch 2.11)."""

DESTROYING = "everstep-destroys-a-group"
"""The name of the threads that groups are left to; one that is still there holds a stuck group."""

_opening = threading.Lock()
"""Which sockets torch opens can only be told by looking before and after: one group at a time."""


class Connection(NamedTuple):
    """One of a group's connections, and who is at its other end if we know."""

    stream: socket.socket
    worker: WorkerId | None


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
        timeout_s=timeout_s,
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
        sockets: Sequence[Connection],
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
        if not tensor.is_cpu:
            return by_way_of(_HOST, tensor, self.all_reduce)
        return _GlooWork(self, self._group.allreduce([tensor]), tensor, name="all-reduce")

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        from torch._C._distributed_c10d import BroadcastOptions

        self.check()
        if not tensor.is_cpu:
            return by_way_of(_HOST, tensor, lambda copy: self.broadcast(copy, source=source))
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
        # gloo's destructor waits for operations under way. They have just been cut and end at once,
        # but for one whose end gloo has missed: that is left behind until gloo's own limit.
        held, self._group = [self._group], None
        destroying = threading.Thread(target=held.clear, name=DESTROYING, daemon=True)
        destroying.start()
        destroying.join(_DESTROY_WITHIN_S)

    def check(self) -> None:
        if self._is_poisoned:
            raise GenerationEnded(self._generation)

    def others(self) -> list[WorkerId]:
        return [worker for place, worker in enumerate(self.members) if place != self.rank]

    def suspects(self) -> list[WorkerId]:
        """Whose connection has ended; everybody it can be, where the connection does not tell."""
        with self._lock:
            ended = {
                c.worker for c in self._sockets if not self._is_closed and has_hung_up(c.stream)
            }
        named = {connection.worker for connection in self._sockets}
        found = [w for w in self.others() if w in ended or (None in ended and w not in named)]
        return found or self.others()


class _GlooWork:
    def __init__(self, group: GlooGroup, work: Any, tensor: Tensor, *, name: str) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # gloo reads and writes its memory until the work is done.
        self._name = name

    def wait(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        left_s = timeout_s
        while not self._is_done(min(left_s, _LOOK_AGAIN_S)):
            waited_s = time.monotonic() - began_s
            left_s = timeout_s - waited_s
            if left_s <= 0:
                others = self._group.others()
                raise PeerSilent(others, awaited=f"an {self._name}", waited_s=waited_s)

    def _is_done(self, within_s: float) -> bool:
        was_completed = self._work.is_completed()
        try:
            self._work.wait(timedelta(seconds=within_s))
        except RuntimeError as error:
            self._group.check()
            if not was_completed:
                return False  # out of time, or broken: then the next look tells
            cause = str(error).partition("\n")[0]
            raise PeerLost(self._group.suspects(), during=self._name, cause=cause) from error
        self._group.check()
        return True


class _Forming:
    """A group on its way. Whatever it waits for, the end of the lifetime frees it."""

    def __init__(
        self,
        *,
        store: StoreAddress,
        prefix: str,
        me: WorkerId,
        members: tuple[WorkerId, ...],
        timeout_s: float,
        lifetime: Lifetime,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._members = members
        self._rank = members.index(me)
        self._others = [worker for worker in members if worker != me]
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._lifetime = lifetime
        self._ours: set[Address] = set()
        self._theirs: dict[Address, WorkerId] = {}
        self._to_store: list[socket.socket] = []

    def form(self, host: str) -> GlooGroup:
        try:
            client, device = self._open(host)
            with self._lifetime.freeing(self._cut):
                group = self._connect(self._meet(client), device)
        except RuntimeError as error:
            raise self._explained(error) from error
        finally:
            for each in self._to_store:
                each.close()
        return GlooGroup(
            group,
            generation=self._lifetime.generation,
            members=self._members,
            rank=self._rank,
            sockets=self._connected(),
        )

    def _open(self, host: str) -> tuple[TCPStore, Any]:
        """Our connection to the store and our listening device; remembers their sockets."""
        from torch._C._distributed_c10d import ProcessGroupGloo

        with _opening:
            before = open_sockets()
            client = connect_store(self._store, timeout_s=self._left_s())
            device = ProcessGroupGloo.create_device(hostname=host)
            new = [number for name, number in open_sockets().items() if name not in before]
            for each in duplicates(new):
                address = local_address(each)
                if address is not None and is_listening(each):
                    self._ours.add(address)
                elif (peer_address(each) or ("", 0))[1] == self._store.port:
                    self._to_store.append(each)
                    continue
                each.close()
        return client, device

    def _meet(self, client: TCPStore) -> Store:
        """Tells the others where we listen and waits until all have told."""
        from torch._C._distributed_c10d import PrefixStore

        meeting = PrefixStore(self._prefix, client)
        keys = [f"address/{worker}" for worker in self._members]
        meeting.set(keys[self._rank], msgspec.json.encode(sorted(self._ours)).decode())
        pause_s = _FIRST_PAUSE_S
        while not meeting.check(keys):
            # Asking again is quiet and can be ended; a wait inside torch's client is neither.
            self._lifetime.pause(pause_s)
            self._lifetime.check()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._left_s() <= 0:
                raise self._silent([w for w in self._others if not meeting.check([f"address/{w}"])])
        for worker, value in zip(self._members, meeting.multi_get(keys), strict=True):
            if worker in self._others:
                addresses = msgspec.json.decode(value, type=list[Address])
                self._theirs |= dict.fromkeys(addresses, worker)
        return meeting

    def _connect(self, meeting: Store, device: Any) -> Any:
        from torch._C._distributed_c10d import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo  # torch's stubs miss the constructor that takes options.
        options = gloo._Options()
        options._devices = [device]
        options._threads = 1
        options._timeout = timedelta(seconds=max(self._left_s(), _LEAST_CONNECT_S))
        group = self._or_leave(lambda: gloo(meeting, self._rank, len(self._members), options))
        group._set_default_timeout(timedelta(seconds=_OPERATION_S))
        return group

    def _or_leave(self, make: Callable[[], Any]) -> Any:
        """Makes the group in a thread of its own, which is left behind when the lifetime ends.

        A member that dies before it connects to us leaves nothing that could be cut: gloo waits for
        it until its time is over, whatever happens meanwhile.
        """
        outcome: Future[Any] = Future()
        is_over = threading.Event()

        def run() -> None:
            try:
                outcome.set_result(make())
            except RuntimeError as error:
                outcome.set_exception(error)
            is_over.set()

        with self._lifetime.freeing(is_over.set):
            threading.Thread(target=run, name=f"connect {self._prefix}", daemon=True).start()
            is_over.wait(max(self._left_s(), _LEAST_CONNECT_S) + _DESTROY_WITHIN_S)
        self._lifetime.check()
        if not outcome.done():
            raise self._silent(self._others)
        return outcome.result()

    def _connected(self) -> list[Connection]:
        """Duplicates of our connections. Whom an accepted one is from, it does not tell."""
        found = []
        for each in duplicates(open_sockets().values()):
            peer = peer_address(each)
            if peer in self._theirs:
                found.append(Connection(each, self._theirs[peer]))
            elif peer is not None and local_address(each) in self._ours:
                found.append(Connection(each, None))
            else:
                each.close()
        return found

    def _cut(self) -> None:
        for each in (*(connection.stream for connection in self._connected()), *self._to_store):
            cut(each)
            each.close()

    def _explained(self, error: RuntimeError) -> EverstepError:
        from torch.distributed import DistNetworkError, DistStoreError

        if self._lifetime.has_ended:
            return GenerationEnded(self._lifetime.generation)
        cause = str(error).partition("\n")[0]
        match error:
            case DistStoreError():
                return self._silent(self._others)
            case DistNetworkError():
                return StoreUnreachable(str(self._store), cause=cause)
            case _:
                return PeerLost(self._others, during=f"the forming of {self._prefix}", cause=cause)

    def _silent(self, workers: Sequence[WorkerId]) -> PeerSilent:
        return PeerSilent(workers, awaited=f"the group {self._prefix}", waited_s=self._timeout_s)

    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()


def _address_towards(store: StoreAddress) -> str:
    """The address of ours from which the store is reached. Sends nothing."""
    family = socket.AF_INET6 if ":" in store.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        return str(probe.getsockname()[0])
