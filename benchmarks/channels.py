"""What a channel should be made of: our TCP channels, gloo send/recv and gloo 2-rank broadcast.

Shows: one-way latency between two processes, side by side in one run, and the ratios.
Run:   python benchmarks/channels.py
Exits with 1 if the chosen transport (TCP) is not the fastest for small messages.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from everstep.comm.endpoint import Endpoint
from everstep.comm.framing import Direction
from everstep.comm.store import StoreAddress, start_store
from everstep.core.ids import WorkerId

SIZES_BYTES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "4 MB": 4 << 20}
SMALL = ("1 KB", "64 KB")
NUM_ROUNDS = {"1 KB": 300, "64 KB": 300, "4 MB": 40}
CHOSEN = "channels (TCP)"
WORKERS = (WorkerId(0, 0), WorkerId(0, 1))
WAIT_S = 30.0

Exchange = Callable[[torch.Tensor, int], None]
"""Sends to the other process if it is our turn, else receives from it."""


def latencies(rank: int, exchange: Exchange) -> dict[str, float]:
    """Ping-pong: the median of half a round trip, per size, in seconds."""
    found = {}
    for name, num_bytes in SIZES_BYTES.items():
        tensor = torch.zeros(num_bytes // 4)
        halves = []
        for number in range(NUM_ROUNDS[name] + 20):
            began_s = time.perf_counter()
            exchange(tensor, 0)
            exchange(tensor, 1)
            if number >= 20:
                halves.append((time.perf_counter() - began_s) / 2)
        found[name] = statistics.median(halves) if rank == 0 else 0.0
    return found


def measure_channels(rank: int, pipe: Connection) -> dict[str, float]:
    me, peer = WORKERS[rank], WORKERS[1 - rank]
    direction = Direction.ACTIVATION
    with Endpoint() as endpoint:
        pipe.send(endpoint.address)
        addresses = dict(zip(WORKERS, pipe.recv(), strict=True))
        channel = [(peer, direction)]
        with endpoint.open(
            generation=0,
            me=me,
            addresses=addresses,
            sends=channel,
            receives=channel,
            token="",
            timeout_s=WAIT_S,
        ) as channels:

            def exchange(tensor: torch.Tensor, turn: int) -> None:
                if turn == rank:
                    channels.send(peer, direction, "0 F 0.0", [tensor])
                else:
                    channels.receive(peer, direction, "0 F 0.0", timeout_s=WAIT_S)

            found = latencies(rank, exchange)
            # Neither may close while the other still reads its last message.
            pipe.send("done")
            pipe.recv()
            return found


def gloo(rank: int, store: StoreAddress, name: str) -> dist.ProcessGroupGloo:
    client = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return dist.ProcessGroupGloo(dist.PrefixStore(name, client), rank, 2, timedelta(seconds=WAIT_S))


def measure_send_recv(rank: int, store: StoreAddress) -> dict[str, float]:
    group = gloo(rank, store, "p2p")

    def exchange(tensor: torch.Tensor, turn: int) -> None:
        if turn == rank:
            group.send([tensor], 1 - rank, 0).wait()
        else:
            group.recv([torch.empty_like(tensor)], 1 - rank, 0).wait()

    return latencies(rank, exchange)


def measure_broadcast(rank: int, store: StoreAddress) -> dict[str, float]:
    group = gloo(rank, store, "broadcast")

    def exchange(tensor: torch.Tensor, turn: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = turn
        group.broadcast([tensor if turn == rank else torch.empty_like(tensor)], options).wait()

    return latencies(rank, exchange)


def worker(rank: int, store: StoreAddress, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(
        {
            CHOSEN: measure_channels(rank, pipe),
            "gloo broadcast": measure_broadcast(rank, store),
            "gloo send/recv": measure_send_recv(rank, store),
        }
    )


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
        for _ in ("addresses", "done"):
            said = [mine.recv() for mine, _ in pairs]
            for mine, _ in pairs:
                mine.send(said)
        results = [mine.recv() for mine, _ in pairs]
        for process in processes:
            process.join(WAIT_S)
    found: dict[str, dict[str, float]] = results[0]
    return found


def main() -> int:
    found = run()
    print(f"one way, median, ms{'':8}" + "".join(f"{size:>20}" for size in SIZES_BYTES))
    for name, by_size in found.items():
        cells = (
            f"{seconds * 1e3:9.3f} ({seconds / found[CHOSEN][size]:6.1f} x)"
            for size, seconds in by_size.items()
        )
        print(f"{name:27}" + "".join(cells))
    is_fastest = all(
        found[CHOSEN][size] <= by_size[size] for by_size in found.values() for size in SMALL
    )
    print(f"{CHOSEN} is {'' if is_fastest else 'NOT '}the fastest for small messages")
    return 0 if is_fastest else 1


if __name__ == "__main__":
    sys.exit(main())
