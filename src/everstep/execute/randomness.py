"""Randomness that belongs to the work, not to the worker.

Each forward is seeded from (seed, step, replica, micro-batch, stage), so whoever computes a
micro-batch, first or again, draws the same dropout masks. Covers torch's generators only; Python's
`random` and NumPy are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def stable_hash(*parts: int | str) -> int:
    """63 bits that are the same in every process and on every machine, unlike `hash`."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_for(seed: int, step: int, replica: int, microbatch: int, stage: int) -> int:
    return stable_hash("forward", seed, step, replica, microbatch, stage)


@contextmanager
def keyed_randomness(seed: int, *, device: torch.device) -> Iterator[None]:
    """Seeds the generators that work on `device` draws from; afterwards they are as before."""
    # torch.manual_seed reaches for every backend (0.2 ms); a forward can be shorter than that.
    generators = _generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators_of(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators
