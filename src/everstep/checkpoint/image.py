"""The bytes of a shard before they exist: a safetensors head, and where each tensor goes. Pure.

    | length | JSON head, padded with spaces | tensor | tensor | ...  |
    0        8                      4096 * k ^ data starts here

safetensors allows no gap between tensors, so the head is padded instead: data starts on a page, and
an arena slot that mirrors the data section can be written with O_DIRECT. Larger items come first,
so that every tensor is aligned to its items.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.checkpoint.layout import Slice

PAGE_BYTES = 4096

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A tensor to be placed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slice: Slice | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    content: Content
    start: int
    """In the data section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    head: bytes
    placed: tuple[Placed, ...]
    data_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.head) + self.data_bytes


def lay_out(contents: Iterable[Content]) -> FileImage:
    ordered = sorted(contents, key=lambda each: (-ITEM_BYTES[each.dtype], each.name))
    placed, start = [], 0
    for content in ordered:
        placed.append(Placed(content=content, start=start))
        start += content.size_bytes
    return FileImage(head=_head(placed), placed=tuple(placed), data_bytes=start)


def round_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _head(placed: list[Placed]) -> bytes:
    sharding = {
        each.content.name: {
            "saved_offsets": each.content.slice.offsets
            if each.content.slice
            else [0] * len(each.content.shape)
        }
        for each in placed
    }
    document: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding),
        }
    }
    for each in placed:
        document[each.content.name] = {
            "dtype": each.content.dtype,
            "shape": each.content.shape,
            "data_offsets": (each.start, each.start + each.content.size_bytes),
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    length = round_up(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length)
