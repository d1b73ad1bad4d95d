"""Reads a stage's part of a checkpoint, of any number of stages, into the stage.

Those who replay a lost stage together read it once: the first of them reads and the others get it
from there, because what they would read is the same, and storage is slower than the network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.checkpoint.finding import find_step
from everstep.checkpoint.raw import bytes_of
from everstep.checkpoint.restore import Found
from everstep.checkpoint.state import FlatState, unflatten
from everstep.comm.group import Group, Work
from everstep.training.stage_tree import StageTree

SPREAD_WITHIN_S = 600.0
"""The first reads all of it before the others get anything."""


def load_step(directory: str | Path, step: int, tree: StageTree) -> dict[str, Any]:
    """Loads the checkpoint of `step`, every byte of it verified. The whole tree that was in it."""
    found = find_step(directory, step)
    return load_part(read_part(found, tree), tree, source=str(found.path))


def load_step_together(directory: str | Path, step: int, tree: StageTree, group: Group) -> None:
    """As `load_step`, for the same stage on all of `group`, and straight into the model's memory:
    when it fails, that may hold anything."""
    found = find_step(directory, step)
    names = [name for name in found.names() if tree.is_mine(name)]
    places = {name: place for name, place in tree.places().items() if place.is_contiguous()}
    is_reader = group.rank == 0
    state = (found.read if is_reader else found.unread)(names, into=places)
    _spread(state, group)
    load_part(state, tree, source=str(found.path))


def _spread(state: FlatState, group: Group) -> None:
    works: list[Work] = [
        group.broadcast(bytes_of(tensor), source=0)
        for _, tensor in sorted(state.tensors.items())
        if tensor.nbytes
    ]
    for work in works:
        work.wait(SPREAD_WITHIN_S)


def read_part(found: Found, tree: StageTree) -> FlatState:
    return found.read([name for name in found.names() if tree.is_mine(name)])


def load_part(state: FlatState, tree: StageTree, *, source: str) -> dict[str, Any]:
    tensors = _OnlyMine(state.tensors)
    loaded: dict[str, Any] = unflatten(FlatState(tensors=tensors, plain=state.plain))
    tree.load(loaded, source=source)
    return loaded


class _OnlyMine(dict[str, Any]):
    """The tensors of other stages were not read: in the tree they are None."""

    def __missing__(self, name: str) -> None:
        return None
