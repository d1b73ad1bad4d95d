"""Another side of recovery.py: one replica under torchft, which goes on without a lost one.

    python torchft_job.py NAME STEP_S LOG        with TORCHFT_LIGHTHOUSE in the environment

A step is so much emulated work, a backward pass and a reduction. Appends the wall-clock time and
the number of replicas of every committed step to LOG.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(name: str, step_s: float, log: Path) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = nn.Linear(256, 256)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    with log.open("a", buffering=1) as lines:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()
            time.sleep(step_s)
            replicated(torch.ones(8, 256)).square().mean().backward()
            optimizer.step()
            if manager.current_step() > before:
                lines.write(f"{time.time()} {manager.num_participants()}\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
