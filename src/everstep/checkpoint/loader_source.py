"""A DataLoader's passes, each of which can be entered in the middle.

Leaves the user's loader as it is and iterates a shallow copy of it, in which the sampler, the
`collate_fn` and the `worker_init_fn` are wrapped. A dataset over indices (map-style) is entered
without loading what was taken; a stream goes on from its own state, or is run through again.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from everstep.checkpoint.order import Entry, ReplayableOrder, generators_of, set_pass
from everstep.checkpoint.random_state import capture_drawn_from, restore_drawn_from
from everstep.checkpoint.worker_marks import (
    Mark,
    MarkedCollate,
    Marks,
    StartWorker,
    is_stateful_stream,
)


class LoaderSource:
    """A `batches.Source`."""

    def __init__(self, loader: DataLoader[Any], when_found: Callable[[], None]) -> None:
        self._loader = loader
        self._when_found = when_found
        self._generators = generators_of(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._has_workers = loader.num_workers > 0
        self._order = self._wrap_order()
        self._view = self._make_view()
        self._marks = Marks()
        self._made_with: dict[str, Any] | None = None
        """The random state that the iterator, and so the seeds of its workers, was made with."""

    # A new pass.

    def begin(self, number: int) -> Iterator[Any]:
        set_pass(self._loader, number)
        are_workers_kept = self._view.__dict__["_iterator"] is not None
        self._marks.next_pass(are_workers_kept=are_workers_kept)
        if not are_workers_kept:
            self._made_with = capture_drawn_from(self._generators)
            self._start_workers_from({})
        return self._unwrap(iter(self._view))

    def _unwrap(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            if not self._has_workers:
                yield item
                continue
            batch, mark = item
            self._marks.add(mark)
            yield batch

    # The rest of a pass.

    def find(self, place: dict[str, Any], *, number: int, taken: int) -> Iterator[Any]:
        set_pass(self._loader, number)
        self._made_with = place["made_with"]
        restore_drawn_from(self._generators, place["made_with"])
        num_repeated = self._find_stream(place, taken) if self._is_stream else place["repeated"]
        self._start_workers_from(_marks_from(place))
        if self._order is not None:
            entry = Entry(random=place["order"], num_skipped=taken - num_repeated)
            self._order.enter(entry)
        # Made here and now: it draws the seeds of its workers, and with workers the order too.
        batches = self._unwrap(iter(self._view))
        for _ in range(num_repeated):
            next(batches, None)
        if self._has_workers or self._is_stream:
            # Otherwise nothing has been drawn yet, and the order calls when it has been.
            self._when_found()
        yield from batches

    def _find_stream(self, place: dict[str, Any], taken: int) -> int:
        """The number of batches to take again."""
        if not is_stateful_stream(self._loader.dataset):
            warnings.warn(
                f"taking {taken} batches again to find the place in a stream"
                f" ({type(self._loader.dataset).__name__}): exact only if it gives the same ones;"
                " with state_dict and load_state_dict it would be quick and sure",
                stacklevel=2,
            )
            return taken
        if not self._has_workers:
            self._loader.dataset.load_state_dict(place["stream"])  # type: ignore[attr-defined]
        repeated: int = place["repeated"]
        return repeated

    def _start_workers_from(self, marks: dict[int, Mark]) -> None:
        if self._has_workers:
            self._view.worker_init_fn = StartWorker(self._loader.worker_init_fn, marks)
            self._marks.begin(list(marks.values()))

    # The place.

    def place(self) -> dict[str, Any]:
        restart = self._marks.restart(self._loader.num_workers)
        place: dict[str, Any] = {
            "made_with": self._made_with,
            "num_workers": self._loader.num_workers,
            "samples": self._num_samples(),
            "batch": self._batch_size(),
            "repeated": restart.num_repeated,
            "workers": {
                str(worker): {"random": _tensor(mark.random), "dataset": mark.dataset}
                for worker, mark in restart.marks.items()
            },
        }
        if self._order is not None:
            place["order"] = self._order.random
        elif is_stateful_stream(self._loader.dataset) and not self._has_workers:
            place["stream"] = self._loader.dataset.state_dict()  # type: ignore[attr-defined]
        return place

    def differs(self, place: dict[str, Any]) -> str | None:
        was = {key: place[key] for key in ("samples", "batch", "num_workers")}
        now = {
            "samples": self._num_samples(),
            "batch": self._batch_size(),
            "num_workers": self._loader.num_workers,
        }
        words = {"samples": "samples", "batch": "samples a batch", "num_workers": "workers"}
        changes = [f"{was[k]} {words[k]}, now {now[k]}" for k in was if was[k] != now[k]]
        return f"the loader had {'; '.join(changes)}" if changes else None

    def close(self) -> None:
        # Left to the garbage collector, each worker that is kept would be waited for in vain (5 s).
        self._view.__dict__["_iterator"] = None

    def _num_samples(self) -> int | None:
        return None if self._is_stream else len(self._loader.dataset)  # type: ignore[arg-type]

    def _batch_size(self) -> int | None:
        sampler = self._loader.batch_sampler
        return self._loader.batch_size or getattr(sampler, "batch_size", None)

    # What the copy of the loader is made of.

    def _wrap_order(self) -> ReplayableOrder | None:
        if self._is_stream:
            return None
        batched = self._loader.batch_sampler
        sampler = self._loader.sampler if batched is None else batched
        return ReplayableOrder(
            sampler, generators=self._generators, when_entered=self._when_order_is_entered
        )

    def _when_order_is_entered(self) -> None:
        if not self._has_workers:
            self._when_found()

    def _make_view(self) -> DataLoader[Any]:
        view = copy.copy(self._loader)
        # DataLoader refuses to have its sampler assigned; this copy has not been iterated yet.
        view.__dict__["_iterator"] = None
        if self._order is not None:
            is_batched = self._loader.batch_sampler is not None
            view.__dict__["batch_sampler" if is_batched else "sampler"] = self._order
        if self._has_workers:
            view.collate_fn = MarkedCollate(self._loader.collate_fn)
        return view


def _marks_from(place: dict[str, Any]) -> dict[int, Mark]:
    return {
        int(worker): Mark(int(worker), each["random"].numpy().tobytes(), each["dataset"])
        for worker, each in place["workers"].items()
    }


def _tensor(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
