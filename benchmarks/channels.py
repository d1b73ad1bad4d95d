"""What a channel should be made of: our TCP channels, gloo send/recv and gloo 2-rank broadcast.

Shows: one-way latency between two processes, the three taking turns in one run, and the ratios.
Run:   python benchmarks/channels.py
Exits with 1 if the chosen transport (TCP) is not the fastest for small messages.

Ours carries key, element type and shape with each message; the two gloo ways carry bytes only.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from everstep.comm.channels import Channels
from everstep.comm.endpoint import Endpoint
from everstep.comm.framing import Direction
from everstep.comm.store import StoreAddress, connect_store, start_store
from everstep.core.ids import WorkerId

SIZES_BYTES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "4 MB": 4 << 20}
SMALL = ("1 KB", "64 KB")
NUM_TURNS = 8
NUM_ROUNDS = {"1 KB": 60, "64 KB": 60, "4 MB": 8}
NUM_WARM_UP = 5
CHOSEN = "channels (TCP)"
WORKERS = (WorkerId(0, 0), WorkerId(0, 1))
WAIT_S = 30.0

Exchange = Callable[[torch.Tensor, int], None]
"""Sends to the other process if the turn is ours, else receives from it."""


def one_way_s(exchanges: Mapping[str, Exchange]) -> dict[str, dict[str, float]]:
    """Ping-pong: the median of half a round trip, per way and size."""
    halves: dict[str, dict[str, list[float]]] = {
        name: {size: [] for size in SIZES_BYTES} for name in exchanges
    }
    for size, num_bytes in SIZES_BYTES.items():
        tensor = torch.zeros(num_bytes // 4)
        for _ in range(NUM_TURNS):
            for name, exchange in exchanges.items():
                halves[name][size] += ping_pong(exchange, tensor, num_rounds=NUM_ROUNDS[size])
    return {
        name: {size: statistics.median(found) for size, found in by_size.items()}
        for name, by_size in halves.items()
    }


def ping_pong(exchange: Exchange, tensor: torch.Tensor, *, num_rounds: int) -> list[float]:
    halves = []
    for _ in range(NUM_WARM_UP + num_rounds):
        began_s = time.perf_counter()
        exchange(tensor, 0)
        exchange(tensor, 1)
        halves.append((time.perf_counter() - began_s) / 2)
    return halves[NUM_WARM_UP:]


def through_channels(rank: int, channels: Channels) -> Exchange:
    peer = WORKERS[1 - rank]

    def exchange(tensor: torch.Tensor, turn: int) -> None:
        if turn == rank:
            channels.send(peer, Direction.ACTIVATION, "12 F 2.5", [tensor])
        else:
            channels.receive(peer, Direction.ACTIVATION, "12 F 2.5", timeout_s=WAIT_S)

    return exchange


def through_send_recv(rank: int, group: Any) -> Exchange:
    def exchange(tensor: torch.Tensor, turn: int) -> None:
        if turn == rank:
            group.send([tensor], 1 - rank, 0).wait()
        else:
            group.recv([torch.empty_like(tensor)], 1 - rank, 0).wait()

    return exchange


def through_broadcast(rank: int, group: Any) -> Exchange:
    def exchange(tensor: torch.Tensor, turn: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = turn
        group.broadcast([tensor if turn == rank else torch.empty_like(tensor)], options).wait()

    return exchange


def gloo(rank: int, store: StoreAddress, name: str) -> Any:
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

    prefixed = PrefixStore(name, connect_store(store, timeout_s=WAIT_S))
    return ProcessGroupGloo(prefixed, rank, 2, timedelta(seconds=WAIT_S))


def worker(rank: int, store: StoreAddress, pipe: Connection) -> None:
    torch.set_num_threads(1)
    channel = [(WORKERS[1 - rank], Direction.ACTIVATION)]
    with Endpoint() as endpoint:
        pipe.send(endpoint.address)
        with endpoint.open(
            generation=0,
            me=WORKERS[rank],
            addresses=dict(zip(WORKERS, pipe.recv(), strict=True)),
            sends=channel,
            receives=channel,
            token="",
            timeout_s=WAIT_S,
        ) as channels:
            found = one_way_s(
                {
                    CHOSEN: through_channels(rank, channels),
                    "gloo broadcast": through_broadcast(rank, gloo(rank, store, "broadcast")),
                    "gloo send/recv": through_send_recv(rank, gloo(rank, store, "p2p")),
                }
            )
            pipe.send(found)
            pipe.recv()  # Neither may close while the other still measures.


def run() -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "everstep.comm.endpoint"])
    with start_store("127.0.0.1") as store:
        pairs = [context.Pipe() for _ in WORKERS]
        processes = [
            context.Process(target=worker, args=(rank, store.address, theirs))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        said: list[Any] = []
        for _ in ("addresses", "results"):
            said = [mine.recv() for mine, _ in pairs]
            for mine, _ in pairs:
                mine.send(said)
        for process in processes:
            process.join(WAIT_S)
    found: dict[str, dict[str, float]] = said[0]
    return found


def main() -> int:
    found = run()
    print(f"{'one way, median, ms':20}" + "".join(f"{size:>20}" for size in SIZES_BYTES))
    for name, by_size in found.items():
        cells = (
            f"{seconds * 1e3:9.3f} ({seconds / found[CHOSEN][size]:6.2f} x)"
            for size, seconds in by_size.items()
        )
        print(f"{name:20}" + "".join(cells))
    is_fastest = all(
        found[CHOSEN][size] <= by_size[size] for by_size in found.values() for size in SMALL
    )
    print(f"{CHOSEN} is {'' if is_fastest else 'NOT '}the fastest for small messages")
    return 0 if is_fastest else 1


if __name__ == "__main__":
    sys.exit(main())
