"""Which samples a micro-batch has, and fetching them ahead of time.

The order is a function of the seed alone, so any worker can fetch any micro-batch. `dataset[i]`
must be a function of `i`: what another worker fetches again after a loss must be the same.

    step 0        step 1        step 2         batch_size 4, 10 samples: a batch may
    7 2 9 0       4 1 8 3       6 5|3 0        cross the end of a pass, nothing is left out
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
from torch.utils.data import default_collate

from everstep.core.clock import Clock, SystemClock
from everstep.core.errors import ConfigError, DataStalled, UserCodeError
from everstep.execute.boundary import flatten, unflatten
from everstep.execute.randomness import stable_hash

Part = Literal["input", "target"]
PARTS: tuple[Part, Part] = ("input", "target")


class Dataset(Protocol):
    """Map-style: `dataset[i]` is a pair (input, target)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, order=True)
class Microbatch:
    """One slice of one step's batch. `replica` is where it belongs, not who computes it."""

    step: int
    replica: int
    number: int

    def __str__(self) -> str:
        return f"micro-batch {self.number} of replica {self.replica} in step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Which samples each step uses. Costs one permutation per pass over the data."""

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError("batch_size", self.batch_size, "must be at least 1")
        if self.num_samples < self.batch_size:
            raise ConfigError(
                "dataset",
                f"{self.num_samples} samples long",
                f"must hold at least one batch of {self.batch_size}",
            )

    def samples_of_step(self, step: int) -> tuple[int, ...]:
        return self._samples(step * self.batch_size, self.batch_size)

    def slice_of(
        self, step: int, replica: int, microbatch: int, replicas: int, microbatches: int
    ) -> tuple[int, ...]:
        """Slice number `replica * microbatches + microbatch` of the step's samples."""
        num_slices = replicas * microbatches
        if self.batch_size % num_slices:
            raise ConfigError(
                "batch_size",
                self.batch_size,
                f"must be a multiple of replicas x micro-batches ({replicas} x {microbatches})",
            )
        size = self.batch_size // num_slices
        number = replica * microbatches + microbatch
        return self._samples(step * self.batch_size + number * size, size)

    def _samples(self, start: int, count: int) -> tuple[int, ...]:
        if not self.shuffle:
            return tuple(place % self.num_samples for place in range(start, start + count))
        samples: list[int] = []
        while len(samples) < count:
            number, first = divmod(start + len(samples), self.num_samples)
            last = min(self.num_samples, first + count - len(samples))
            order = _permutation(self.num_samples, self.seed, number)
            samples += order[first:last].tolist()
        return tuple(samples)


# Two passes are read around a boundary, and a few more when steps are run again.
@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(stable_hash("order", seed, number))
    return torch.randperm(num_samples, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How each step's batch is cut into micro-batches."""

    order: SampleOrder
    replicas: int
    microbatches: int

    def samples(self, mb: Microbatch) -> tuple[int, ...]:
        return self.order.slice_of(mb.step, mb.replica, mb.number, self.replicas, self.microbatches)


def check_dataset(dataset: Dataset) -> None:
    """Fetches one sample and says what is wrong with it, before training starts."""
    state = torch.default_generator.get_state()
    fetch(dataset, (0,))
    if not torch.equal(state, torch.default_generator.get_state()):
        torch.default_generator.set_state(state)
        raise ConfigError(
            "dataset",
            f"a {type(dataset).__name__} that draws from torch's global generator",
            "dataset[i] must be a function of i: use a torch.Generator of its own, seeded with i",
        )


def fetch(
    dataset: Dataset, samples: Sequence[int], *, parts: Iterable[Part] = PARTS
) -> tuple[Any, Any]:
    """The inputs and targets of `samples` as one batch each; None for a part not asked for."""
    items = [_fetch_one(dataset, index) for index in samples]
    asked = frozenset(parts)
    inputs, targets = (
        _collate(part, samples, [item[place] for item in items]) if part in asked else None
        for place, part in enumerate(PARTS)
    )
    return inputs, targets


def _fetch_one(dataset: Dataset, index: int) -> Sequence[Any]:
    try:
        item = dataset[index]
    except Exception as error:
        raise UserCodeError(f"dataset[{index}]", error=error) from error
    if not isinstance(item, tuple | list) or len(item) != len(PARTS):
        raise ConfigError(
            f"dataset[{index}]", f"a {type(item).__name__}", "must be a pair (input, target)"
        )
    return item


def _collate(part: Part, samples: Sequence[int], items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except Exception as error:
        where = f"putting together the {part}s of samples {', '.join(map(str, samples))}"
        raise UserCodeError(where, error=error) from error


class Fetcher:
    """Fetches the micro-batches that a worker will need, ahead, in a thread of its own.

    Tell it what comes with `expect`, then `take` each, from one thread. What was not expected
    (adopted after a loss) can be taken as well: it is fetched next.
    """

    def __init__(
        self,
        dataset: Dataset,
        slicing: Slicing,
        *,
        parts: Iterable[Part] = PARTS,
        look_ahead: int = 4,
        device: torch.device | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`device`: where the batches will go. A CUDA device reads them without anybody's waiting
        if they are in page-locked memory."""
        self.waited_s = 0.0
        """How long `take` has waited so far: what a slow dataset costs."""
        self._dataset = dataset
        self._slicing = slicing
        self._parts = frozenset(parts)
        self._look_ahead = look_ahead
        self._device = device if device is not None and device.type == "cuda" else None
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._expected: Iterator[Microbatch] = iter(())
        self._num_expectations = 0
        self._awaited: Microbatch | None = None
        self._fetched_early: set[Microbatch] = set()
        self._ready: dict[Microbatch, tuple[Any, Any] | Exception] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="everstep-data", daemon=True)
        self._thread.start()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, upcoming: Iterable[Microbatch]) -> None:
        """Replaces what is expected. `upcoming` may be endless; it is read as needed."""
        with self._changed:
            self._expected = iter(upcoming)
            self._num_expectations += 1
            self._fetched_early.clear()
            self._ready.clear()
            self._changed.notify_all()

    def take(self, mb: Microbatch, *, timeout_s: float = 600.0) -> tuple[Any, Any]:
        """The (input, target) of `mb`; None for a part that was not asked for."""
        started_s = self._clock.now_s()
        with self._changed:
            self._awaited = mb
            self._changed.notify_all()
            self._changed.wait_for(lambda: mb in self._ready or self._is_closed, timeout_s)
            self._awaited = None
            waited_s = self._clock.now_s() - started_s
            self.waited_s += waited_s
            batch = self._ready.pop(mb, None)
            self._changed.notify_all()
        if batch is None:
            raise DataStalled(str(mb), waited_s=waited_s)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stops the thread. One that is stuck in the dataset is left behind; it ends with us."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # A thread begins on device 0.
        while (work := self._next()) is not None:
            mb, expectation = work
            batch = self._fetch(mb)
            with self._changed:
                # What is no longer expected would fill the look-ahead for ever.
                if expectation == self._num_expectations or mb == self._awaited:
                    self._ready[mb] = batch
                    self._changed.notify_all()

    def _next(self) -> tuple[Microbatch, int] | None:
        """Waits for a micro-batch to fetch; None when closed."""
        with self._changed:
            while not self._is_closed:
                if self._awaited is not None and self._awaited not in self._ready:
                    self._fetched_early.add(self._awaited)
                    return self._awaited, self._num_expectations
                if len(self._ready) < self._look_ahead and (mb := self._pull()) is not None:
                    return mb, self._num_expectations
                self._changed.wait()
        return None

    def _pull(self) -> Microbatch | None:
        for mb in self._expected:
            if mb not in self._fetched_early:
                return mb
            self._fetched_early.discard(mb)
        return None

    def _fetch(self, mb: Microbatch) -> tuple[Any, Any] | Exception:
        try:
            batch = fetch(self._dataset, self._slicing.samples(mb), parts=self._parts)
            return batch if self._device is None else (_pinned(batch[0]), _pinned(batch[1]))
        except (UserCodeError, ConfigError) as error:
            return error


def _pinned(value: Any) -> Any:
    if value is None:
        return None
    tensors, structure = flatten(value)
    # A dataset may keep its samples on the device: then there is nothing to bring there.
    pinned = [tensor.pin_memory() if tensor.is_cpu else tensor for tensor in tensors]
    return unflatten(pinned, structure)
