"""Ways to save a state, behind one interface, for `benchmarks/checkpoint.py`.

Each keeps one directory, saves what it is given, and says when that was durable. The stock ones are
used as their documentation shows, with their files synced; DCP also in the setting found fastest.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save, save

from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.restore import load_newest
from everstep.checkpoint.state import FlatState

State = dict[str, torch.Tensor]
WAIT_S = 600.0

# DCP warns on its own threads, once per save, that it works in a single process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class System(Protocol):
    name: str

    def tidy(self) -> None:
        """Frees what is older than the newest save, or all; not timed. Where a file system takes
        long for that, what is measured would be that."""

    def save(self, step: int, state: State) -> None:
        """Returns when forward and backward may run."""

    def before_update(self) -> None:
        """Returns when the state may change."""

    def durable_at_s(self) -> float:
        """Waits; the time (perf_counter) at which the last save was on disk."""

    def load(self, state: State) -> None:
        """Reads the newest save into these tensors."""

    def files(self) -> list[Path]: ...

    def close(self) -> None: ...


class Everstep:
    name = "everstep"

    def __init__(self, directory: Path, state: State) -> None:
        self._directory = directory
        size_bytes = sum(tensor.nbytes for tensor in state.values())
        settings = EngineSettings(max_slot_bytes=size_bytes)
        self.engine = Engine(directory, settings=settings, keep=_OnlyNewest())
        self.engine.start_writer()
        self.engine.prepare(FlatState(tensors=state))
        self._started_s = 0.0
        self.last: Mapping[str, Any] = {}

    def tidy(self) -> None:
        """Its writer does it by itself, behind a save."""
        deadline_s = time.monotonic() + WAIT_S
        while len(list(self._directory.glob("*"))) > 2:  # the newest save and the lock
            assert time.monotonic() < deadline_s, f"{WAIT_S} s and {self._directory} is not tidy"
            time.sleep(0.05)

    def save(self, step: int, state: State) -> None:
        self._started_s = time.perf_counter()
        assert self.engine.save(step, FlatState(tensors=state)), self.engine.poll()

    def before_update(self) -> None:
        self.engine.before_update()

    def durable_at_s(self) -> float:
        self.engine.wait(WAIT_S)
        self.last = self.engine.poll()[-1]
        assert self.last["event"] == "checkpoint", self.last
        durable_s: Any = self.last["durable_seconds"]
        return self._started_s + float(durable_s)

    def load(self, state: State) -> None:
        assert load_newest(self._directory, into=state) is not None

    def files(self) -> list[Path]:
        return [path for path in self._directory.glob("step-*/*") if path.is_file()]

    def close(self) -> None:
        self.engine.close()


class _OnlyNewest:
    def keeps(self, entries: object) -> set[int]:  # noqa: ARG002 the engine keeps the newest
        return set()


class TorchSave:
    name = "torch.save"

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._path = directory / "state.pt"
        self._ended_s = 0.0

    def tidy(self) -> None:
        self._path.unlink(missing_ok=True)

    def save(self, step: int, state: State) -> None:  # noqa: ARG002
        with self._path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self._ended_s = time.perf_counter()

    def before_update(self) -> None:
        pass

    def durable_at_s(self) -> float:
        return self._ended_s

    def load(self, state: State) -> None:
        for name, tensor in torch.load(self._path, weights_only=True).items():
            state[name].copy_(tensor)

    def files(self) -> list[Path]:
        return [self._path]

    def close(self) -> None:
        pass


class Dcp:
    """`torch.distributed.checkpoint`: `how` begins a save and may give its future."""

    def __init__(
        self, name: str, directory: Path, how: Callable[[State, FileSystemWriter], Any]
    ) -> None:
        self.name = name
        self._directory = directory
        self._how = how
        self._ended_s = 0.0
        self._staged: Future[Any] | None = None
        self._done: Future[Any] | None = None

    def tidy(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def save(self, step: int, state: State) -> None:  # noqa: ARG002
        writer = FileSystemWriter(self._directory, sync_files=True, thread_count=1)
        result = self._how(state, writer)
        self._staged = self._done = None
        if isinstance(result, AsyncSaveResponse):
            self._staged, self._done = result.staging_completion, result.upload_completion
        elif isinstance(result, Future):
            self._done = result
        if self._done is None:
            self._ended_s = time.perf_counter()
        else:
            self._done.add_done_callback(self._end)

    def _end(self, _: Future[Any]) -> None:
        self._ended_s = time.perf_counter()

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result(WAIT_S)

    def durable_at_s(self) -> float:
        if self._done is not None:
            self._done.result(WAIT_S)
        return self._ended_s

    def load(self, state: State) -> None:
        load(state, checkpoint_id=self._directory, no_dist=True)

    def files(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if path.is_file()]

    def close(self) -> None:
        self.durable_at_s()


def stock_systems(directory: Path, *, device: str) -> list[System]:
    """Those of torch. The stager is made once: what it allocates is used again by the next save."""
    has_device = device != "cpu"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=has_device,
            use_shared_memory=not has_device,
            use_async_staging=has_device,
            use_non_blocking_copy=has_device,
        )
    )
    return [
        TorchSave(directory / "torch"),
        Dcp("dcp.save", directory / "dcp", lambda s, w: save(s, storage_writer=w, no_dist=True)),
        Dcp(
            "dcp.async_save",
            directory / "async",
            lambda s, w: async_save(s, storage_writer=w, no_dist=True),
        ),
        Dcp(
            "dcp.async_save, cached stager",
            directory / "cached",
            lambda s, w: async_save(s, storage_writer=w, async_stager=stager, no_dist=True),
        ),
    ]
