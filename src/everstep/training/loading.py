"""Reads a stage's part of a checkpoint, of any number of stages, into the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.checkpoint.finding import find_step
from everstep.checkpoint.restore import Found
from everstep.checkpoint.state import FlatState, unflatten
from everstep.training.stage_tree import StageTree


def load_step(directory: str | Path, step: int, tree: StageTree) -> dict[str, Any]:
    """Loads the checkpoint of `step`, every byte of it verified. The whole tree that was in it."""
    found = find_step(directory, step)
    return load_part(read_part(found, tree), tree, source=str(found.path))


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
