"""Which slice of which whole tensor a part holds, and who writes what several parts hold. Pure.

Names are those of the whole model. A part is one rank of a save; a box is a rectangular piece of a
tensor. Invariant: of the parts that hold equal copies, exactly one writes each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """One of the `of` parts that together are a checkpoint."""

    index: int
    of: int
    run: str = ""
    """The same for all parts of one save, and another one whenever states may differ: after a
    restart, in another generation. Parts of different runs are never joined."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ConfigError("part.index", self.index, f"it must be in 0 ... {self.of - 1}")
        if self.of > 1 and not self.run:
            raise ConfigError(
                "part.run",
                "empty",
                "several parts need a name they agree on, or a restart could join old and new",
            )
        if any(not (letter.isalnum() or letter in "-_") for letter in self.run):
            raise ConfigError(
                "part.run", self.run, "letters, digits, - and _ only: it names a file"
            )


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a whole tensor: where it starts, and how large the whole is."""

    offsets: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the tensors of a part are of the whole model."""

    slices: Mapping[str, Slice] = field(default_factory=dict)
    """Tensors that are pieces of larger ones. Those not named here are whole."""

    copies: tuple[int, ...] = ()
    """The parts that hold equal copies of what this one holds, itself included: each writes its
    share. Empty: this part writes all it holds."""

    private: frozenset[str] = frozenset()
    """Names this part alone holds, and writes, although it shares the others."""


@dataclass(frozen=True, slots=True)
class Box:
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def slices(self, *, within: Box | None = None) -> tuple[slice, ...]:
        """As an index into the whole tensor, or into a box of it."""
        origin = within.offsets if within else (0,) * len(self.shape)
        return tuple(
            slice(start - zero, start - zero + length)
            for start, length, zero in zip(self.offsets, self.shape, origin, strict=True)
        )


def overlap(one: Box, other: Box) -> Box | None:
    starts = tuple(map(max, one.offsets, other.offsets))
    ends = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def names_to_write(sizes: Mapping[str, int], *, part: Part, layout: Layout) -> set[str]:
    """The names among `sizes` (bytes) that this part writes; its copies write the others.

    Largest first to whoever has least so far: every part decides alike without a word.
    """
    if len(layout.copies) <= 1:
        return set(sizes)
    if part.index not in layout.copies:
        raise ConfigError("layout.copies", layout.copies, f"part {part.index} itself must be there")
    loads = dict.fromkeys(sorted(layout.copies), 0)
    mine = {name for name in sizes if name in layout.private}
    for name in sorted(sizes.keys() - mine, key=lambda name: (-sizes[name], name)):
        owner = min(loads, key=lambda index: (loads[index], index))
        loads[owner] += sizes[name]
        if owner == part.index:
            mine.add(name)
    return mine
