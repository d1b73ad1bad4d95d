"""Times an undo against the optimizer step it takes back, for every optimizer with an inverse.

Shows: undo / step for 20 million parameters in 100 tensors, both in one run, and the bytes that a
record holds between steps. Exits with 1 when a ratio passes the limit or a record holds a tensor.
Run:   python benchmarks/undo.py [--parameters N] [--tensors N] [--rounds N] [--threads N]
       [--device cuda]

On the CPU the times are processor time, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from everstep.recovery.undo import remember, undo

LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """One optimizer with its settings; `limited` when its ratio must stay under the limit."""

    optimizer: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    limited: bool = True
    num_tensors: int | None = None
    """Fewer tensors than the others, where a step is slow."""

    @property
    def name(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.optimizer.__name__}({settings})"


CASES = [
    Case(torch.optim.SGD, {"lr": 1e-3}),
    Case(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    Case(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}),
    Case(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "nesterov": True}),
    Case(torch.optim.Adam, {}),
    Case(torch.optim.Adam, {"weight_decay": 0.01}),
    Case(torch.optim.AdamW, {}),
    Case(torch.optim.AdamW, {"foreach": True}),
    Case(torch.optim.NAdam, {}),
    Case(torch.optim.RAdam, {}),
    Case(torch.optim.RMSprop, {}),
    Case(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    Case(torch.optim.Adagrad, {}),
    Case(torch.optim.Adadelta, {}),
    Case(torch.optim.Muon, {}, num_tensors=4),
    Case(torch.optim.Adafactor, {}),
    # A fused step makes one pass over memory; for comparison only.
    Case(torch.optim.AdamW, {"fused": True}, limited=False),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The best rounds of one case, and what its record holds."""

    step_s: float
    undo_s: float
    ratio: float
    num_bytes_kept: int


def main() -> int:
    """Prints the table and says whether every ratio is within the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=20_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    side = round((args.parameters / args.tensors) ** 0.5)
    params = [
        torch.nn.Parameter(torch.randn(side, side, device=args.device) * 0.02)
        for _ in range(args.tensors)
    ]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    print(f"{len(params)} tensors of {side} x {side} on {args.device}, limit {LIMIT}")
    print(f"{'optimizer':54} {'step ms':>9} {'undo ms':>9} {'ratio':>6} {'bytes kept':>10}")
    too_slow = []
    for case in CASES:
        timing = measure(case, params[: case.num_tensors], num_rounds=args.rounds)
        print(
            f"{case.name:54} {timing.step_s * 1e3:9.1f} {timing.undo_s * 1e3:9.1f}"
            f" {timing.ratio:6.2f} {timing.num_bytes_kept:10}"
            + ("" if case.limited else "  (not limited)"),
            flush=True,
        )
        if case.limited and (timing.ratio > LIMIT or timing.num_bytes_kept > 0):
            too_slow.append(case.name)
    print(f"over the limit: {', '.join(too_slow) or 'none'}")
    return 1 if too_slow else 0


def measure(case: Case, params: list[torch.nn.Parameter], *, num_rounds: int) -> Timing:
    """Steps and undoes in turn, so that a slow moment of the machine hits both alike."""
    optimizer = case.optimizer(params, **case.settings)
    optimizer.step()
    steps, undos, num_bytes_kept = [], [], 0
    for _ in range(num_rounds + 1):
        record = remember(optimizer)
        num_bytes_kept = record.num_bytes_kept
        steps.append(seconds(optimizer.step))
        undos.append(seconds(lambda record=record: undo(optimizer, record=record)))  # type: ignore[misc]
    # The first round warms caches and the allocator up.
    step_s, undo_s = min(steps[1:]), min(undos[1:])
    return Timing(
        step_s=step_s, undo_s=undo_s, ratio=undo_s / step_s, num_bytes_kept=num_bytes_kept
    )


def seconds(work: Callable[[], object]) -> float:
    """Time of `work`: of the processor, or of the wall with the device's queue run dry."""
    if not torch.cuda.is_available():
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
