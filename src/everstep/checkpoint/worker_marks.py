"""What a DataLoader's workers do so that they can be started again in mid-pass.

Each batch comes with a mark: the worker's random state (and a stateful dataset's state) right after
it made the batch. A worker started from a mark makes the same next batch, augmentations included.
Both classes travel to the workers, so hold nothing that cannot be sent there.

    worker 0    b0        b2        b4  ->         the training process has taken b0 .. b4;
    worker 1         b1        b3       ->         b5 is worker 1's

New workers are served in turn from number 0. So those that have had their turn in the last round
(here worker 0, with b4) start one mark earlier and make that batch again, which is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from everstep.checkpoint.random_state import pack_random, unpack_random


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a worker stood after a batch."""

    worker: int
    random: bytes
    dataset: Any = None
    """Of an IterableDataset with a `state_dict`, else None."""


class MarkedCollate:
    """The user's `collate_fn`, and with each batch the mark."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Any, Mark]:
        batch = self._collate(samples)
        info = get_worker_info()
        assert info is not None, "marks are for loaders with workers"
        dataset: Any = info.dataset
        state = dataset.state_dict() if is_stateful_stream(dataset) else None
        return batch, Mark(info.id, pack_random(), state)


class StartWorker:
    """The user's `worker_init_fn`; then the worker goes on from its mark, when it has one."""

    def __init__(
        self, initialize: Callable[[int], None] | None, marks: Mapping[int, Mark] | None = None
    ) -> None:
        self._initialize = initialize
        self._marks = marks or {}

    def __call__(self, worker: int) -> None:
        if self._initialize is not None:
            self._initialize(worker)
        mark = self._marks.get(worker)
        if mark is None:
            return
        info = get_worker_info()
        if mark.dataset is not None and info is not None:
            dataset: Any = info.dataset
            dataset.load_state_dict(mark.dataset)
        unpack_random(mark.random)


@dataclass(frozen=True, slots=True)
class Restart:
    """How workers are started so that the next batch is the one that was next."""

    marks: Mapping[int, Mark]
    num_repeated: int
    """Batches that are made again and thrown away."""


class Marks:
    """The last two marks of every worker, kept by the training process."""

    def __init__(self) -> None:
        self._last: dict[int, deque[Mark]] = {}
        self._num_batches: dict[int, int] = {}
        self._newest: int | None = None

    def add(self, mark: Mark) -> None:
        self._last.setdefault(mark.worker, deque(maxlen=2)).append(mark)
        self._num_batches[mark.worker] = self._num_batches.get(mark.worker, 0) + 1
        self._newest = mark.worker

    def begin(self, marks: Sequence[Mark]) -> None:
        """The workers have been started from these."""
        self._last = {mark.worker: deque([mark], maxlen=2) for mark in marks}

    def next_pass(self, *, are_workers_kept: bool) -> None:
        """Workers that live on keep their random state; a stream begins anew either way."""
        kept = self._last if are_workers_kept else {}
        self._last = {
            worker: deque((replace(mark, dataset=None) for mark in marks), maxlen=2)
            for worker, marks in kept.items()
        }
        self._num_batches = {}
        self._newest = None

    def restart(self, num_workers: int) -> Restart:
        had_their_turn = self._had_their_turn(num_workers)
        marks: dict[int, Mark] = {}
        for worker, last in self._last.items():
            if worker not in had_their_turn:
                marks[worker] = last[-1]
            elif len(last) == 2:
                marks[worker] = last[0]
        return Restart(marks, len(had_their_turn))

    def _had_their_turn(self, num_workers: int) -> set[int]:
        newest = self._newest
        if newest is None or newest == num_workers - 1:
            return set()
        # A stream that has run dry made fewer batches: it is passed over, and repeats none.
        rounds = self._num_batches[newest]
        return {w for w in range(newest + 1) if self._num_batches.get(w, 0) == rounds}


def is_stateful_stream(dataset: object) -> bool:
    return isinstance(dataset, IterableDataset) and is_stateful(dataset)


def is_stateful(thing: object) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
