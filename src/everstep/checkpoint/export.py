"""Checkpoints to and from what other tools write: one safetensors file, DCP, torch.save.

What comes in is never trusted with code: torch.save files are read with weights_only, and the
metadata of DCP, which is a pickle, is read by an unpickler that knows only DCP's own data classes.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.checkpoint.disk import LocalDisk
from everstep.checkpoint.engine import Engine
from everstep.checkpoint.image import Content, lay_out
from everstep.checkpoint.raw import bytes_of, dtype_name
from everstep.checkpoint.restore import Found
from everstep.checkpoint.state import Tree, flatten, unflatten
from everstep.core.errors import CheckpointNotWritten, NotImportable

WRITTEN_WITHIN_S = 3600.0
_METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"

_HARMLESS = {
    *((f"{_DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip
"""What the metadata of DCP is made of: data classes, and a lookup of a layout by its name."""


def write_safetensors(found: Found, target: Path, *, prefix: str = "") -> int:
    """The tensors whose name starts with `prefix`, which is cut off, as one file. How many."""
    names = {name: name.removeprefix(prefix) for name in found.names() if name.startswith(prefix)}
    tensors = {names[name]: t for name, t in found.read(names).tensors.items()}
    image = lay_out(
        Content(name=name, dtype=dtype_name(t.dtype), shape=tuple(t.shape))
        for name, t in tensors.items()
    )
    file = LocalDisk().create(target)
    try:
        file.write(image.head, at=0)
        for placed in image.placed:
            tensor = tensors[placed.content.name]
            if tensor.numel():
                data = bytes_of(tensor).numpy().data
                file.write(data, at=len(image.head) + placed.start)
        file.sync()
    finally:
        file.close()
    return len(tensors)


def write_dcp(found: Found, target: Path) -> None:
    """The whole tree, for `torch.distributed.checkpoint.load`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # It says that it works in a single process.
        save(unflatten(found.read()), storage_writer=FileSystemWriter(target), no_dist=True)


def read_torch_save(source: Path) -> Tree:
    try:
        return torch.load(source, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise NotImportable(str(source), why=_reason(error)) from None


def read_dcp(source: Path) -> Tree:
    metadata = _read_metadata(source)
    flat: dict[str, Any] = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        if isinstance(kind, TensorStorageMetadata)
        else None
        for name, kind in metadata.state_dict_metadata.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            reader = _VettedReader(source, metadata)
            load(flat, storage_reader=reader, planner=_WeightsOnlyPlanner(), no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise NotImportable(str(source), why=_reason(cause)) from None
    paths = metadata.planner_data or {name: (name,) for name in flat}
    return _nested({tuple(paths.get(name, (name,))): value for name, value in flat.items()})


def write_checkpoint(tree: Tree, directory: str | Path, *, step: int) -> None:
    """A tree as a checkpoint of everstep's own."""
    with Engine(directory) as engine:
        engine.save(step, flatten(tree))
        engine.wait(WRITTEN_WITHIN_S)
        (event,) = engine.poll()
    if event["event"] != "checkpoint":
        raise CheckpointNotWritten(str(directory), step=step, why=str(event["why"]))


def _reason(error: BaseException) -> str:
    """torch explains weights_only at length; the line that matters names what it would not load."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "GLOBAL" in line), lines[0])


class _VettedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"its metadata would run {module}.{name}")
        return super().find_class(module, name)


def _read_metadata(source: Path) -> Metadata:
    try:
        metadata = _VettedUnpickler(io.BytesIO((source / _METADATA_FILE).read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise NotImportable(str(source), why=str(error)) from None
    if not isinstance(metadata, Metadata):
        raise NotImportable(str(source), why=f"its metadata is a {type(metadata).__name__}")
    return metadata


class _VettedReader(FileSystemReader):
    """DCP's own reader, given metadata that has been looked at."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _WeightsOnlyPlanner(DefaultLoadPlanner):
    """DCP's own would unpickle what is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = torch.load(value, weights_only=True)


def _nested(items: dict[tuple[str | int, ...], Any]) -> Tree:
    """DCP's paths as a tree: a number is a place in a list."""
    if list(items) == [()]:
        return items[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in items.items():
        below.setdefault(path[0], {})[path[1:]] = value
    inner = {key: _nested(part) for key, part in below.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
