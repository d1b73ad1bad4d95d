"""Worker processes for the tests of comm: started from a warm parent, told what to do, killed.

A module of its own, because a process started by forkserver must be able to import its target.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from everstep.comm.endpoint import Endpoint
from everstep.comm.framing import Direction
from everstep.comm.gloo import GlooGroup, form_gloo
from everstep.comm.group import Group
from everstep.comm.lifetime import Lifetime
from everstep.comm.nccl import form_nccl
from everstep.comm.store import StoreAddress
from everstep.core.errors import GenerationEnded, PeerLost, PeerSilent
from everstep.core.ids import WorkerId

WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    process: BaseProcess
    pipe: Connection

    def hear(self) -> Any:
        """What the worker says next; fails instead of hanging when it says nothing."""
        assert self.pipe.poll(WAIT_S), f"worker {self.process.pid} said nothing for {WAIT_S} s"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


@contextmanager
def workers(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> Iterator[list[Worker]]:
    """One process per tuple of arguments; `target` gets a pipe first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "everstep.comm.gloo"])
    started = []
    for each in arguments:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *each), daemon=True)
        process.start()
        theirs.close()
        started.append(Worker(process=process, pipe=ours))
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()
            worker.pipe.close()
            worker.process.close()


def members_of(size: int) -> list[WorkerId]:
    return [WorkerId(replica, 0) for replica in range(size)]


def form(kind: str, store: StoreAddress, rank: int, size: int, generation: int = 0) -> Group:
    make: Callable[..., Group] = form_nccl if kind == "nccl" else form_gloo
    members = members_of(size)
    return make(
        store=store,
        generation=generation,
        name="stage-0",
        me=members[rank],
        members=members,
        timeout_s=WAIT_S,
    )


def keep_contract(pipe: Connection, kind: str, store: StoreAddress, rank: int, size: int) -> None:
    """What every group promises, seen from one member. Says what it found."""
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if kind == "nccl" else "cpu"
    group = form(kind, store, rank, size)
    summed = torch.full((1000,), float(rank + 1), device=device)
    number = torch.tensor(rank + 1, device=device)
    # Both under way at once: operations are asynchronous and keep their order.
    works = [group.all_reduce(summed), group.all_reduce(number)]
    for work in works:
        work.wait(WAIT_S)
    given = torch.full((3,), float(rank), device=device)
    group.broadcast(given, source=size - 1).wait(WAIT_S)
    pipe.send((group.members, group.rank, summed.tolist(), int(number), given.tolist()))
    pipe.recv()
    group.poison()
    group.poison()
    try:
        group.all_reduce(summed)
    except GenerationEnded as ended:
        pipe.send(ended.generation)
    group.close()
    group.close()


def wait_for_missing(pipe: Connection, store: StoreAddress, rank: int, size: int) -> None:
    """All but the last reduce; the last only joins. A word on the pipe poisons."""
    torch.set_num_threads(1)
    group = form("gloo", store, rank, size)
    pipe.send("formed")
    if rank == size - 1:
        pipe.recv()
        return
    work = group.all_reduce(torch.ones(1000))
    threading.Thread(target=poison_on_command, args=(pipe, group), daemon=True).start()
    try:
        work.wait(0.05)
    except PeerSilent as silent:
        pipe.send(str(silent))
    try:
        work.wait(WAIT_S)
    except (GenerationEnded, PeerLost) as error:
        pipe.send((type(error).__name__, getattr(error, "suspects", ()), time.monotonic()))
    group.close()
    pipe.send("closed")


def poison_on_command(pipe: Connection, group: Group) -> None:
    pipe.recv()
    group.poison()


def num_sockets(pipe: Connection, store: StoreAddress, rank: int, size: int) -> None:
    """Says how many connections each of two groups has got hold of."""
    counts = []
    groups = [form("gloo", store, rank, size, generation) for generation in (0, 1)]
    for group in groups:
        assert isinstance(group, GlooGroup)
        counts.append(len(group._sockets))
    pipe.send(counts)
    pipe.recv()
    groups[0].close()
    # The second must not have lost its connections with the first.
    tensor = torch.ones(1)
    groups[1].all_reduce(tensor).wait(WAIT_S)
    pipe.send(tensor.item())
    pipe.recv()
    groups[1].close()


def live_many_generations(
    pipe: Connection, store: StoreAddress, rank: int, size: int, num_generations: int
) -> None:
    """Forms, uses and ends groups and channels; every third is poisoned while stuck."""
    torch.set_num_threads(1)
    others = [worker for worker in members_of(size) if worker != members_of(size)[rank]]
    channels_to = [(worker, Direction.ACTIVATION) for worker in others]
    with Endpoint() as endpoint:
        pipe.send(endpoint.address)
        addresses = dict(zip(members_of(size), pipe.recv(), strict=True))
        for generation in range(num_generations):
            lifetime = Lifetime(generation)
            group = form_gloo(
                store=store,
                generation=generation,
                name="stage-0",
                me=members_of(size)[rank],
                members=members_of(size),
                timeout_s=WAIT_S,
                lifetime=lifetime,
            )
            with endpoint.open(
                generation=generation,
                me=members_of(size)[rank],
                addresses=addresses,
                sends=channels_to,
                receives=channels_to,
                token="t",
                timeout_s=WAIT_S,
                lifetime=lifetime,
            ) as channels:
                for worker, direction in channels_to:
                    channels.send(worker, direction, "k", [torch.zeros(300_000)])
                group.all_reduce(torch.ones(10)).wait(WAIT_S)
                if generation % 3 == 0:
                    get_stuck(group, rank, size, lifetime)
                else:
                    for worker, direction in channels_to:
                        channels.receive(worker, direction, "k", timeout_s=WAIT_S)
                    group.all_reduce(torch.ones(10)).wait(WAIT_S)
            group.close()
            if generation in (num_generations // 10, num_generations - 1):
                pipe.send(held_resources())
        pipe.recv()


def get_stuck(group: Group, rank: int, size: int, lifetime: Lifetime) -> None:
    """A reduction that the last member never joins, freed by the end of the generation."""
    work = group.all_reduce(torch.ones(10)) if rank < size - 1 else None
    threading.Timer(0.005, lifetime.end).start()
    if work is not None:
        try:
            work.wait(WAIT_S)
        except (GenerationEnded, PeerLost):
            pass
        else:
            raise AssertionError("the reduction ended without its last member")
    lifetime.pause(WAIT_S)


def held_resources() -> tuple[int, int]:
    """Descriptors and threads of this process, once those that are ending have ended."""
    counts = (0, 0)
    for _ in range(100):
        before, counts = (
            counts,
            (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))),
        )
        if counts == before:
            break
        threading.Event().wait(0.02)
    return counts


def exchange(pipe: Connection, rank: int) -> None:
    """Worker 0 sends numbered activations until it is killed; worker 1 receives them."""
    me, peer = members_of(2)[rank], members_of(2)[1 - rank]
    channel = [(peer, Direction.ACTIVATION)]
    with Endpoint() as endpoint:
        pipe.send(endpoint.address)
        channels = endpoint.open(
            generation=0,
            me=me,
            addresses=dict(zip(members_of(2), pipe.recv(), strict=True)),
            sends=channel,
            receives=channel,
            token="t",
            timeout_s=WAIT_S,
        )
        with channels:
            if rank == 0:
                for number in range(3):
                    channels.send(peer, Direction.ACTIVATION, str(number), [torch.ones(5) * number])
                pipe.send("sent")
                pipe.recv()
                return
            pipe.recv()  # The other one is dead by now.
            for number in range(3):
                message = channels.receive(
                    peer, Direction.ACTIVATION, str(number), timeout_s=WAIT_S
                )
                pipe.send(message.tensors[0].tolist())
            try:
                channels.receive(peer, Direction.ACTIVATION, "3", timeout_s=WAIT_S)
            except PeerLost as lost:
                pipe.send((lost.suspects, lost.has_left))
            try:
                while True:
                    channels.send(peer, Direction.ACTIVATION, "0", [torch.ones(5)])
            except PeerLost as lost:
                pipe.send(lost.suspects)
