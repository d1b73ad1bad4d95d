"""Cuts a state into what is copied at a time: waves, portions, pieces.

    data section   |------ wave 0 ------|------ wave 1 ------|-- 2 --|      a wave fills a slot
    a wave         | portion | portion | ... |                              handed over one by one
    a portion      pieces of tensors, small ones in batches                 copied by two threads

A state that fits into a slot is one wave. The writer begins with the first portion while the others
are still copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.checkpoint.arena import Slot
from everstep.checkpoint.image import FileImage
from everstep.checkpoint.raw import bytes_of

PORTION_BYTES = 64 << 20
"""The disk waits for the first one; each costs a message."""

PIECE_BYTES = 16 << 20
"""Large enough that Python does not show, small enough that a waiting trainer finds some left."""

_SMALL_BYTES = 1 << 16
# To let go of the interpreter for a few microseconds is to wait milliseconds for its return when
# the trainer is busy in Python: small copies keep it.
_move_small = ctypes.PyDLL(None).memmove
_move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_small.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Bytes `at ... at + size_bytes` of a data section, and where they lie in their slot."""

    at: int
    size_bytes: int
    slot_at: int
    is_last_of_slot: bool
    is_last: bool


def waves(
    data_bytes: int, slot_bytes: int, *, portion_bytes: int = PORTION_BYTES
) -> Iterator[list[Portion]]:
    """At least one, with at least one portion: an empty state is saved too."""
    for start in range(0, max(data_bytes, 1), slot_bytes):
        end = min(start + slot_bytes, data_bytes)
        yield [
            Portion(
                at=at,
                size_bytes=min(portion_bytes, end - at),
                slot_at=at - start,
                is_last_of_slot=at + portion_bytes >= end,
                is_last=at + portion_bytes >= end == data_bytes,
            )
            for at in range(start, max(end, start + 1), portion_bytes)
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `first ... first + size_bytes` of a tensor, and where they go in a slot."""

    source: torch.Tensor
    first: int
    size_bytes: int
    slot: Slot
    at: int

    def copy(self, *, has_pool: bool = False) -> None:
        """`has_pool`: on the trainer's thread, whose pool of threads is idle while it waits."""
        source = self.source
        if not is_plain(source):
            source = source.resolve_conj().resolve_neg().contiguous()
        if source.is_cuda or (has_pool and self.size_bytes > _SMALL_BYTES):
            wanted = bytes_of(source)[self.first : self.first + self.size_bytes]
            target = self.slot.memory[self.at : self.at + self.size_bytes]
            target.copy_(wanted, non_blocking=True)
        else:
            # Not torch's copy: that would wake a second pool of threads beside the trainer's.
            move = _move_small if self.size_bytes <= _SMALL_BYTES else ctypes.memmove
            move(self.slot.address + self.at, source.data_ptr() + self.first, self.size_bytes)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def batches_of(pieces: Sequence[Piece], *, piece_bytes: int = PIECE_BYTES) -> list[list[Piece]]:
    """Small pieces together, so that threads meet rarely."""
    batches: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        if left < piece.size_bytes:
            batches.append([])
            left = piece_bytes
        batches[-1].append(piece)
        left -= piece.size_bytes
    return batches


def pieces_of(
    image: FileImage,
    tensors: Mapping[str, torch.Tensor],
    slot: Slot,
    portion: Portion,
    *,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[Piece]:
    for placed in image.placed:
        low = max(placed.start, portion.at)
        high = min(placed.start + placed.content.size_bytes, portion.at + portion.size_bytes)
        if low >= high:
            continue
        source = tensors[placed.content.name]
        # What is not plain is made so by each piece of it: then one piece is best.
        step = piece_bytes if is_plain(source) else high - low
        for start in range(low, high, step):
            yield Piece(
                source=source,
                first=start - placed.start,
                size_bytes=min(step, high - start),
                slot=slot,
                at=portion.slot_at + start - portion.at,
            )
