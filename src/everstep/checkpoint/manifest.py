"""A checkpoint as data: its parts, their tensors, their checksums; sealed JSON. Pure.

Every rank writes one part record; all of them joined are the manifest, byte for byte the same
whoever joins them. A sealed document carries the SHA-256 of itself, so that no flipped bit passes.
Invariant: what `unseal_*` returns is what `seal` was given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

FORMAT = 1
"""Raised when a field changes its meaning; new fields do not raise it."""

BLOCK_BYTES = 16 << 20
"""A tensor has one checksum for each block of it, so that blocks are read and checked at once."""

CHECKSUM = "xxh3-64"
_SEAL = b',"sha256":"'


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor, or a box of one, in a shard."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    size_bytes: int
    checksums: tuple[str, ...]
    """Of each block of `BLOCK_BYTES`, in order; none for an empty tensor."""
    offsets: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    """Where this box lies in the whole tensor, and its shape. Empty: it is the whole."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.whole or self.shape

    @property
    def origin(self) -> tuple[int, ...]:
        return self.offsets or (0,) * len(self.shape)


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote."""

    format: int
    step: int
    run: str
    index: int
    of: int
    file: str
    file_bytes: int
    head_bytes: int
    head_checksum: str
    tensors: tuple[TensorRecord, ...]
    plain: Any
    """The tree around the tensors, as `state` writes it."""
    about: dict[str, Any]
    """What the trainer says of the step: loss, data position."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    checksum: str
    block_bytes: int
    step: int
    run: str
    about: dict[str, Any]
    parts: tuple[PartRecord, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.file_bytes for part in self.parts)


class BadDocument(ValueError):
    """Bytes that are not a sealed document; the text says why."""


_Document = TypeVar("_Document", PartRecord, Manifest)


def part_file_name(index: int) -> str:
    return f"part-{index:05}.json"


def shard_file_name(index: int, of: int) -> str:
    return f"shard-{index + 1:05}-of-{of:05}.safetensors"


MANIFEST_FILE = "manifest.json"


def join_parts(parts: Iterable[PartRecord]) -> Manifest:
    """The manifest of a whole set of parts, the same from any order."""
    ordered = tuple(sorted(parts, key=lambda part: part.index))
    first = ordered[0]
    assert [part.index for part in ordered] == list(range(first.of)), "a part is missing"
    assert len({(part.step, part.run, part.of) for part in ordered}) == 1, "parts do not match"
    return Manifest(
        format=FORMAT,
        checksum=CHECKSUM,
        block_bytes=BLOCK_BYTES,
        step=first.step,
        run=first.run,
        about={key: value for part in reversed(ordered) for key, value in part.about.items()},
        parts=ordered,
    )


def seal(document: PartRecord | Manifest) -> bytes:
    body = msgspec.json.encode(document)
    return b"".join((body[:-1], _SEAL, hashlib.sha256(body).hexdigest().encode(), b'"}'))


def unseal_part(data: bytes) -> PartRecord:
    return _unseal(data, PartRecord)


def unseal_manifest(data: bytes) -> Manifest:
    manifest = _unseal(data, Manifest)
    if manifest.format != FORMAT:
        raise BadDocument(f"it is of format {manifest.format}, this version reads {FORMAT}")
    if manifest.checksum != CHECKSUM or manifest.block_bytes != BLOCK_BYTES:
        raise BadDocument(
            f"unknown checksums: {manifest.checksum} per {manifest.block_bytes} bytes"
        )
    return manifest


def _unseal(data: bytes, kind: type[_Document]) -> _Document:
    body, seal_mark, _ = data.rpartition(_SEAL)
    body += b"}"
    digest = hashlib.sha256(body).hexdigest().encode()
    if not seal_mark or data != b"".join((body[:-1], _SEAL, digest, b'"}')):
        raise BadDocument(f"its checksum does not match its {len(data)} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadDocument(str(error)) from None


def num_blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)


def lacking(parts: Sequence[PartRecord], *, of: int) -> list[int]:
    present = {part.index for part in parts}
    return [index for index in range(of) if index not in present]
