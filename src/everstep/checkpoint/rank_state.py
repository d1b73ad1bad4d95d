"""One rank's state as a part of a whole checkpoint, and back.

    model/...  optimizer/...     what all ranks hold alike: written once, each rank its share
    ranks/1/own/scheduler/...    what is rank 1's own
    ranks/1/extras/...           what its loop needs to go on: random states, its place in the data

A job that comes back with other ranks than it left with takes the alike parts as they are; a rank
that was not there before takes over the rest of one that was. That is said, and no longer exact.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from everstep.checkpoint.layout import Layout
from everstep.checkpoint.restore import Found
from everstep.checkpoint.state import JSON, FlatState, flatten, unflatten
from everstep.checkpoint.subjects import Subjects

Tree: TypeAlias = dict[str, Any]

_logger = logging.getLogger("everstep.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    shared: Tree
    own: Tree
    extras: Tree
    kinds: Mapping[str, str]
    """The classes of the things that were saved."""

    private: Collection[str] = ()
    """Names in `shared` that this rank alone writes."""


def capture(
    subjects: Subjects, extras: Tree, *, rank: int, size: int
) -> tuple[FlatState, Layout | None]:
    """What this rank hands to its engine. Raises StateNotSavable."""
    shared, own = subjects.capture()
    state = RankState(
        shared=shared,
        own=own,
        extras=extras,
        kinds=subjects.kinds(),
        private=subjects.private_names(),
    )
    flat, layout = compose(state, rank=rank, size=size)
    volatile = flat.tensors.keys() - subjects.still_names(flat.tensors)
    return replace(flat, volatile=frozenset(volatile)), layout


def compose(state: RankState, *, rank: int, size: int) -> tuple[FlatState, Layout | None]:
    """As named tensors and plain JSON. No tensor is volatile yet."""
    mine = {"own": state.own, "extras": state.extras}
    flat = flatten({**state.shared, "kinds": dict(state.kinds), "ranks": {str(rank): mine}})
    if size == 1:
        return flat, None
    private = {name for name in flat.tensors if name in state.private or _is_of(name, rank)}
    return flat, Layout(copies=tuple(range(size)), private=frozenset(private))


def read_for_rank(found: Found, *, rank: int, size: int) -> RankState:
    """Reads, and so verifies, what this rank needs. Raises CheckpointCorrupt."""
    source = rank % len(found.manifest.parts)
    if len(found.manifest.parts) != size:
        _logger.warning(
            "%s was saved by %d ranks and this job has %d: rank %d takes the random state and the"
            " place in the data of rank %d; what follows is not bit for bit what would have been",
            found.path,
            len(found.manifest.parts),
            size,
            rank,
            source,
        )
    names = [n for n in found.names() if not n.startswith("ranks/") or _is_of(n, source)]
    flat = found.read(names)
    tree = unflatten(replace(flat, plain=_without_others(flat.plain, source)))
    mine = tree.pop("ranks")[str(source)]
    kinds = tree.pop("kinds")
    return RankState(shared=tree, own=mine["own"], extras=mine["extras"], kinds=kinds)


def _is_of(name: str, rank: int) -> bool:
    return name.startswith(f"ranks/{rank}/")


def _without_others(plain: Any, rank: int) -> JSON:
    """The tree, as `state` writes it, without the branches of ranks whose tensors were not read."""
    branches = plain["dict"]
    mine = {str(rank): branches["ranks"]["dict"][str(rank)]}
    return {"dict": {**branches, "ranks": {"dict": mine}}}
