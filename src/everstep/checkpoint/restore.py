"""Gets a state back: finds the newest checkpoint that verifies, reads all of it or some slices.

Every byte that is read is checked. A checkpoint that does not verify is passed over, and that is
said. Invariant: what `read` returns is what was saved, bit for bit, or it raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from everstep.checkpoint.layout import Box, overlap, whole_box
from everstep.checkpoint.manifest import BLOCK_BYTES, Manifest, PartRecord, TensorRecord
from everstep.checkpoint.raw import bytes_of, dtype_of
from everstep.checkpoint.reading import Block, describe, read_blocks
from everstep.checkpoint.remote_storage import (
    fetch_step,
    is_url,
    staging_directory,
    whole_steps,
)
from everstep.checkpoint.state import JSON, FlatState, join_plain
from everstep.checkpoint.storage import (
    is_being_written,
    partials_in,
    read_manifest,
    step_name,
    steps_in,
)
from everstep.core.errors import CheckpointCorrupt, NotInCheckpoint

_logger = logging.getLogger("everstep.checkpoint")

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A checkpoint that was not used, and why."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint whose manifest verifies."""

    path: Path
    manifest: Manifest
    passed_over: tuple[PassedOver, ...] = ()
    """Newer ones that do not."""

    @property
    def step(self) -> int:
        return self.manifest.step

    def names(self) -> list[str]:
        return list({r.name: None for part in self.manifest.parts for r in part.tensors})

    def read(
        self,
        names: Iterable[str] | None = None,
        *,
        into: Mapping[str, torch.Tensor] | None = None,
        boxes: Mapping[str, Box] | None = None,
    ) -> FlatState:
        """The tensors `names` (all), whole or the `boxes` of them, and the whole tree around them.

        Tensors in `into` are filled in place, on any device; the others are new. Raises
        CheckpointCorrupt: tensors in `into` may then hold anything.
        """
        into, boxes = into or {}, boxes or {}
        reading = _Reading(self)
        tensors = {
            name: reading.add(name, boxes.get(name), into.get(name))
            for name in (self.names() if names is None else names)
        }
        reading.run()
        return FlatState(tensors=tensors, plain=self.plain())

    def unread(
        self, names: Iterable[str], *, into: Mapping[str, torch.Tensor] | None = None
    ) -> FlatState:
        """As `read` returns it, for whoever gets the bytes from another reader: tensors that are
        not in `into` are new, and none is filled."""
        reading = _Reading(self)
        into = into or {}
        tensors = {name: reading.add(name, None, into.get(name)) for name in names}
        return FlatState(tensors=tensors, plain=self.plain())

    def plain(self, part: int | None = None) -> JSON:
        """The tree of one part, or of all, joined key by key."""
        parts = self.manifest.parts
        if part is not None:
            chosen: JSON = parts[part].plain
            return chosen
        return join_plain([each.plain for each in parts])

    def problems(self) -> list[str]:
        """Reads all of it; what is wrong with it."""
        blocks = [
            block
            for part in self.manifest.parts
            for block in (_head_block(self.path, part), *_all_blocks(self.path, part))
        ]
        return [f"{bad.path.name}: {bad.why}" for bad in read_blocks(blocks)]

    def verified(self) -> Found:
        """Itself, when every byte of it is as it was written."""
        problems = self.problems()
        if problems:
            raise CheckpointCorrupt(str(self.path), why=problems[0])
        return self


class _Reading:
    """What is to be read for one call of `read`."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._by_name: dict[str, list[tuple[PartRecord, TensorRecord]]] = {}
        for part in found.manifest.parts:
            for record in part.tensors:
                self._by_name.setdefault(record.name, []).append((part, record))
        self._blocks: list[Block] = []
        self._heads: dict[int, Block] = {}
        self._pastes: list[tuple[torch.Tensor, torch.Tensor]] = []
        """From tensors that were read whole, parts go to where they are wanted."""

    def add(self, name: str, box: Box | None, target: torch.Tensor | None) -> torch.Tensor:
        records = self._by_name.get(name)
        if not records:
            raise self._not_there(name, "it has no tensor of that name")
        first = records[0][1]
        box = box or whole_box(first.whole_shape)
        dtype = dtype_of(first.dtype)
        if target is None:
            target = torch.empty(box.shape, dtype=dtype)
        elif target.dtype != dtype or tuple(target.shape) != box.shape:
            there = f"{dtype} {list(box.shape)}"
            here = f"{target.dtype} {list(target.shape)}"
            raise self._not_there(name, f"it is {there} there, and the tensor to fill is {here}")
        self._add_pieces(name, box, target, records)
        return target

    def _add_pieces(
        self,
        name: str,
        box: Box,
        target: torch.Tensor,
        records: Sequence[tuple[PartRecord, TensorRecord]],
    ) -> None:
        # Several parts may have written the same box: the first one's is taken.
        pieces = {Box(r.origin, r.shape): (part, r) for part, r in reversed(records)}
        covered = 0
        for piece, (part, record) in pieces.items():
            common = box if piece == box else overlap(piece, box)
            if common is None:
                continue
            covered += common.num_elements
            if piece == box and target.is_contiguous():
                self._add_record(part, record, target)
            else:
                whole = torch.empty(record.shape, dtype=target.dtype)
                self._add_record(part, record, whole)
                place = target.detach()[common.slices(within=box)]
                self._pastes.append((place, whole[common.slices(within=piece)]))
        if covered != box.num_elements:
            why = f"{covered} of its {box.num_elements} elements are there"
            raise self._not_there(name, why)

    def _add_record(self, part: PartRecord, record: TensorRecord, target: torch.Tensor) -> None:
        if part.index not in self._heads:
            self._heads[part.index] = _head_block(self._found.path, part)
        if record.size_bytes:
            path = self._heads[part.index].path
            self._blocks.extend(_blocks(path, record, bytes_of(target)))

    def _not_there(self, name: str, why: str) -> NotInCheckpoint:
        return NotInCheckpoint(name, checkpoint=str(self._found.path), why=why)

    def run(self) -> None:
        bad = read_blocks([*self._heads.values(), *self._blocks])
        if bad:
            raise CheckpointCorrupt(str(self._found.path), why=describe(bad))
        for place, piece in self._pastes:
            place.copy_(piece)


def _head_block(path: Path, part: PartRecord) -> Block:
    return Block(
        path=path / part.file,
        start=0,
        size_bytes=part.head_bytes,
        checksum=part.head_checksum,
        what="its head",
    )


def _all_blocks(path: Path, part: PartRecord) -> Iterator[Block]:
    for record in part.tensors:
        yield from _blocks(path / part.file, record, None)


def _blocks(path: Path, record: TensorRecord, target: torch.Tensor | None) -> Iterator[Block]:
    for number, checksum in enumerate(record.checksums):
        first = number * BLOCK_BYTES
        size_bytes = min(BLOCK_BYTES, record.size_bytes - first)
        yield Block(
            path=path,
            start=record.start + first,
            size_bytes=size_bytes,
            checksum=checksum,
            what=f"tensor {record.name}",
            target=None if target is None else target[first : first + size_bytes],
        )


def look_at(path: Path) -> Found | PassedOver:
    """A checkpoint's manifest and the sizes of its files; its bytes are not read."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return PassedOver(path=path, why=manifest)
    if step_name(manifest.step) != path.name:
        return PassedOver(path=path, why=f"its manifest is of step {manifest.step}")
    for part in manifest.parts:
        try:
            size_bytes = (path / part.file).stat().st_size
        except OSError as error:
            return PassedOver(path=path, why=f"{part.file} is not there: {error.strerror}")
        if size_bytes != part.file_bytes:
            why = f"{part.file} has {size_bytes} bytes, not {part.file_bytes}"
            return PassedOver(path=path, why=why)
    return Found(path=path, manifest=manifest)


def newest(directory: str | Path) -> Found | None:
    """The newest checkpoint of which every byte verifies; None when there is no checkpoint at all.

    Raises CheckpointCorrupt when there are some and none verifies: whether to begin anew is then
    the user's decision.
    """
    return first_good(directory, Found.verified)


def load_newest(
    directory: str | Path,
    *,
    names: Iterable[str] | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Found, FlatState] | None:
    """`newest` and its `read`, in one pass over the bytes."""
    return first_good(directory, lambda found: (found, found.read(names, into=into)))


def checkpoints_in(directory: str | Path) -> Iterator[Path]:
    """The directories of all checkpoints, newest first; from a URL they are brought here."""
    if is_url(directory):
        return (fetch_step(str(directory), step) for step in whole_steps(str(directory)))
    return (Path(directory) / step_name(step) for step in steps_in(Path(directory)))


def first_good(directory: str | Path, use: Callable[[Found], _Result]) -> _Result | None:
    """What `use` makes of the newest one for which it does not raise CheckpointCorrupt."""
    passed_over: list[PassedOver] = []
    for path in checkpoints_in(directory):
        seen = look_at(path)
        if isinstance(seen, Found):
            try:
                return use(replace(seen, passed_over=tuple(passed_over)))
            except CheckpointCorrupt as corrupt:
                seen = PassedOver(path=seen.path, why=corrupt.why)
        _logger.warning("passing over %s: %s", seen.path, seen.why)
        passed_over.append(seen)
    if passed_over:
        why = (
            f"none of its {len(passed_over)} checkpoints verifies, the newest: {passed_over[0].why}"
        )
        raise CheckpointCorrupt(str(directory), why=why)
    return None


def wait_writers(directory: str | Path, *, timeout_s: float) -> bool:
    """Until no live writer works in `directory`: that of a trainer that was killed may be about to
    finish the newest checkpoint. Whether they finished in time."""
    deadline_s = time.monotonic() + timeout_s
    local = staging_directory(str(directory)) if is_url(directory) else Path(directory)
    while any(is_being_written(partial) for partial in partials_in(local)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True
