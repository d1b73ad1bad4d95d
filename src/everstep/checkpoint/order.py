"""The order in which a loader's samples come, so that it can be entered in the middle.

Stands in for the loader's (batch) sampler and gives the same indices. It notes the random state
that a pass began with; the same state and the same sampler give the same order again, so a place
in it is that state and a number. Nothing is loaded for the indices that are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from everstep.checkpoint.random_state import capture_drawn_from, restore_drawn_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where to enter the next pass."""

    random: dict[str, Any]
    """What its order was drawn from."""

    num_skipped: int


class ReplayableOrder:
    """Wraps a sampler. What it does not define itself, it takes from the sampler."""

    def __init__(
        self,
        sampler: Any,
        *,
        generators: Sequence[torch.Generator],
        when_entered: Callable[[], None],
    ) -> None:
        self.random: dict[str, Any] | None = None
        """What the order of this pass was drawn from; None before the first."""

        self._sampler = sampler
        self._generators = generators
        self._when_entered = when_entered
        self._entry: Entry | None = None

    def enter(self, entry: Entry) -> None:
        """The next pass is one that was begun before."""
        self._entry = entry

    def __iter__(self) -> Iterator[Any]:
        # A generator: all this happens when the first index is asked for, where the sampler draws.
        entry, self._entry = self._entry, None
        if entry is None:
            self.random = capture_drawn_from(self._generators)
            yield from self._sampler
            return
        self.random = entry.random
        restore_drawn_from(self._generators, entry.random)
        indices = iter(self._sampler)
        for _ in range(entry.num_skipped):
            next(indices, None)
        self._when_entered()
        yield from indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Those that the user gave to the loader or its samplers, each once."""
    found: dict[int, torch.Generator] = {}
    for holder in (loader, *samplers_of(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
    return list(found.values())


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """The batch sampler, the sampler, and what they wrap."""
    found: list[Any] = []
    waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        sampler = waiting.pop(0)
        if sampler is None or any(sampler is each for each in found):
            continue
        found.append(sampler)
        waiting += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return found


def set_pass(loader: DataLoader[Any], number: int) -> None:
    """Tells whoever shuffles by the number of the pass: DistributedSampler, some datasets."""
    for shuffler in (*samplers_of(loader), loader.dataset, loader):
        if callable(set_epoch := getattr(shuffler, "set_epoch", None)):
            set_epoch(number)
