"""A loader whose place can be kept and found again, in the middle of a pass.

    place of a DataLoader    pass, batches taken, the random state its order was drawn from, and the
                             state of each worker; found again without loading what was taken
    of a stateful loader     its own `state_dict`
    of anything else         the number of batches taken; found again by taking them once more

Does not keep the state of the process: `when_found` is called where that must be restored, after
the order was drawn again and before the next batch is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

from torch.utils.data import DataLoader

from everstep.checkpoint.loader_source import LoaderSource
from everstep.checkpoint.worker_marks import is_stateful

Place = dict[str, Any]
"""Tensors and plain values, fit for a checkpoint."""


class Source(Protocol):
    """Where the batches of one pass come from."""

    def begin(self, number: int) -> Iterator[Any]:
        """A new pass, the `number`th from 0."""
        ...

    def find(self, place: Place, *, number: int, taken: int) -> Iterator[Any]:
        """The rest of a pass of which `taken` batches have been used."""
        ...

    def place(self) -> Place: ...

    def differs(self, place: Place) -> str | None:
        """Why the place cannot be found in this loader, in words."""
        ...

    def close(self) -> None: ...


class Batches:
    """Each `iter` is one pass, or the rest of one when a place was loaded before."""

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        when_found: Callable[[], None] = lambda: None,
        is_read_ahead: bool = False,
    ) -> None:
        """`is_read_ahead`: whoever iterates takes each batch while the one before is in use, so
        the place that is kept is the one before the newest batch."""
        self.loader = loader
        self._is_read_ahead = is_read_ahead
        self._behind: Place | None = None
        self._source = _source_of(loader, when_found)
        self._pass = 0
        self._taken = 0
        self._place: Place | None = None

    def __iter__(self) -> Iterator[Any]:
        place, self._place = self._place, None
        if place is not None:
            self._pass, self._taken = place["pass"], place["taken"]
            batches = self._source.find(place["source"], number=self._pass, taken=self._taken)
        else:
            self._pass, self._taken = self._pass + (self._taken > 0), 0
            batches = self._source.begin(self._pass)
        while True:
            if self._is_read_ahead:
                self._behind = self._here()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._taken += 1
            yield batch

    def __len__(self) -> int:
        return len(cast(Any, self.loader))

    def __getattr__(self, name: str) -> Any:
        # Frameworks look at a loader's sampler, dataset and number of workers.
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def length(self) -> int | None:
        """Batches in a pass, where the loader can tell."""
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    @property
    def is_in_pass(self) -> bool:
        """Whether the next `iter` goes on in a pass that was begun before."""
        return self._place is not None

    def state_dict(self) -> Place:
        if self._place is not None:
            return self._place
        return self._here() if self._behind is None else self._behind

    def _here(self) -> Place:
        source = {"kind": type(self._source).__name__, **self._source.place()}
        return {"pass": self._pass, "taken": self._taken, "source": source}

    def load_state_dict(self, place: Place) -> None:
        """The next `iter` goes on there. Of another loader, it begins the pass after it."""
        if (why := self._differs(place["source"])) is not None:
            warnings.warn(
                f"the place in the data cannot be found again, a new pass begins: {why}",
                stacklevel=2,
            )
            self._pass, self._taken = place["pass"] + 1, 0
            return
        self._place = place

    def close(self) -> None:
        """Ends workers that would live on. The last iterator must have been dropped."""
        self._source.close()

    def _differs(self, source: Place) -> str | None:
        kind = type(self._source).__name__
        if source["kind"] != kind:
            return f"the loader was a {source['kind']} and is a {kind}"
        return self._source.differs(source)


class OwnStateSource:
    """A loader that keeps its own place: `state_dict` and `load_state_dict`."""

    def __init__(self, loader: Any, when_found: Callable[[], None]) -> None:
        self._loader = loader
        self._when_found = when_found

    def begin(self, number: int) -> Iterator[Any]:  # noqa: ARG002
        return iter(self._loader)

    def find(self, place: Place, *, number: int, taken: int) -> Iterator[Any]:  # noqa: ARG002
        self._loader.load_state_dict(place["loader"])
        batches = iter(self._loader)
        self._when_found()
        yield from batches

    def place(self) -> Place:
        return {"loader": self._loader.state_dict()}

    def differs(self, place: Place) -> str | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


class CountedSource:
    """Any other iterable."""

    def __init__(self, loader: Iterable[Any], when_found: Callable[[], None]) -> None:
        self._loader = loader
        self._when_found = when_found

    def begin(self, number: int) -> Iterator[Any]:  # noqa: ARG002
        return iter(self._loader)

    def find(self, place: Place, *, number: int, taken: int) -> Iterator[Any]:  # noqa: ARG002
        if not isinstance(self._loader, Sequence):
            warnings.warn(
                f"taking {taken} batches again to find the place in a"
                f" {type(self._loader).__name__}: exact only if it gives the same ones;"
                " with state_dict and load_state_dict it would be quick and sure",
                stacklevel=2,
            )
        batches = iter(self._loader)
        for _ in range(taken):
            next(batches, None)
        self._when_found()
        yield from batches

    def place(self) -> Place:
        return {}

    def differs(self, place: Place) -> str | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        pass


def _source_of(loader: Iterable[Any], when_found: Callable[[], None]) -> Source:
    if is_stateful(loader):
        return OwnStateSource(loader, when_found)
    if isinstance(loader, DataLoader):
        return LoaderSource(loader, when_found)
    return CountedSource(loader, when_found)
