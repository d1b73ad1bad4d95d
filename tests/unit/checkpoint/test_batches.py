"""A place in the data is found again: the same batches, and the same random numbers after each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from everstep.checkpoint.batches import Batches
from everstep.checkpoint.random_state import capture_random, restore_random

Make = Callable[[], Any]


class Augmented(Dataset[Tensor]):
    """Eleven samples, each with noise from all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


class Counting(IterableDataset[int]):
    """A stream that can tell where it is; each worker has its share of unequal length."""

    def __init__(self) -> None:
        self.at = self.begin_at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        self.at, self.begin_at = self.begin_at, 0
        while self.at < (17 if worker == 0 else 9):
            self.at += 1
            yield self.at * num_workers + worker

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["at"]


class Forgetful(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(13)


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True, **options)


def with_generator() -> DataLoader[Any]:
    return shuffled(generator=torch.Generator().manual_seed(5))


def with_replacement() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(6)
    sampler = RandomSampler(Augmented(), replacement=True, num_samples=40, generator=generator)
    return DataLoader(Augmented(), batch_size=2, sampler=sampler)


def distributed() -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(Augmented(), num_replicas=2, rank=1)
    return DataLoader(Augmented(), batch_size=2, sampler=sampler)


def unbatched() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=None, shuffle=True)


def counting(num_workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Counting(), batch_size=2, num_workers=num_workers)


class Stateful:
    """A loader that keeps its own place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 7:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


IN_PROCESS: list[Make] = [
    shuffled,
    with_generator,
    with_replacement,
    distributed,
    unbatched,
    counting,
    Stateful,
    lambda: [1, 2, 3, 4, 5],
]
WITH_WORKERS: list[Make] = [
    lambda: shuffled(num_workers=2),
    lambda: shuffled(num_workers=2, persistent_workers=True),
    lambda: shuffled(num_workers=2, generator=torch.Generator().manual_seed(5)),
    lambda: counting(num_workers=2),
]


def endless(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def drawn(stream: Iterator[Any], number: int) -> list[Any]:
    """Batches, and after each what the training process would draw: dropout, say."""
    return [
        (plain(batch), float(torch.rand(())), random.random(), float(np.random.rand()))
        for batch in islice(stream, number)
    ]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def resumed_after(make: Make, taken: int, further: int) -> list[Any]:
    """In what could be another process: other seeds, another loader."""
    seed(1)
    batches = Batches(make())
    drawn(endless(batches), taken)
    place, now = batches.state_dict(), capture_random()
    batches.close()
    seed(99)
    again = Batches(make(), when_found=lambda: restore_random(now))
    again.load_state_dict(place)
    seen = drawn(endless(again), further)
    again.close()
    return seen


def undisturbed(make: Make, number: int) -> list[Any]:
    seed(1)
    batches = Batches(make())
    seen = drawn(endless(batches), number)
    batches.close()
    return seen


@pytest.mark.parametrize("make", IN_PROCESS)
@pytest.mark.parametrize("taken", [1, 4, 5, 6, 9, 15])
def test_a_place_is_found_again_with_its_random_state(make: Make, taken: int) -> None:
    assert resumed_after(make, taken, 14) == undisturbed(make, taken + 14)[taken:]


@pytest.mark.parametrize("make", WITH_WORKERS)
@pytest.mark.parametrize("taken", [1, 4, 6, 9])
def test_workers_go_on_where_they_were(make: Make, taken: int) -> None:
    assert resumed_after(make, taken, 8) == undisturbed(make, taken + 8)[taken:]


def test_a_place_found_again_can_be_kept_at_once() -> None:
    make = WITH_WORKERS[0]
    seed(1)
    first = Batches(make())
    drawn(endless(first), 4)
    place, now = first.state_dict(), capture_random()
    first.close()
    second = Batches(make(), when_found=lambda: restore_random(now))
    second.load_state_dict(place)
    assert len(drawn(endless(second), 1)) == 1
    place, later = second.state_dict(), capture_random()
    second.close()
    third = Batches(make(), when_found=lambda: restore_random(later))
    third.load_state_dict(place)
    assert drawn(endless(third), 6) == undisturbed(make, 11)[5:]


@pytest.mark.parametrize("make", [shuffled, with_generator, unbatched, distributed])
def test_wrapping_a_loader_changes_nothing(make: Make) -> None:
    seed(1)
    loader, number = make(), 0

    def passes() -> Iterator[Any]:
        nonlocal number
        while True:
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(number)
            yield from loader
            number += 1

    bare = drawn(passes(), 15)
    assert bare == undisturbed(make, 15)


def test_a_stream_without_state_is_run_through_again_and_says_so() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Forgetful(), batch_size=2)

    with pytest.warns(UserWarning, match="taking 3 batches again to find the place in a stream"):
        again = resumed_after(make, 3, 6)
    assert again == undisturbed(make, 9)[3:]


def test_a_changed_loader_begins_a_new_pass_and_says_what_changed() -> None:
    batches = Batches(shuffled())
    drawn(endless(batches), 2)
    other = Batches(DataLoader(Augmented(), batch_size=3, shuffle=True))
    with pytest.warns(UserWarning, match="had 2 samples a batch, now 3"):
        other.load_state_dict(batches.state_dict())
    assert len(list(other)) == 4
