"""Reads a stage's part of a checkpoint, of any number of stages, into the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.checkpoint.restore import Found, look_at
from everstep.checkpoint.state import FlatState, unflatten
from everstep.checkpoint.storage import step_name
from everstep.core.errors import CheckpointCorrupt
from everstep.training.stage_tree import StageTree


def load_step(directory: Path, step: int, tree: StageTree) -> None:
    """Loads the checkpoint of `step`, every byte of it verified."""
    path = directory / step_name(step)
    seen = look_at(path)
    if not isinstance(seen, Found):
        raise CheckpointCorrupt(str(path), why=seen.why)
    load_part(read_part(seen, tree), tree, source=str(path))


def read_part(found: Found, tree: StageTree) -> FlatState:
    return found.read([name for name in found.names() if tree.is_mine(name)])


def load_part(state: FlatState, tree: StageTree, *, source: str) -> None:
    tensors = _OnlyMine(state.tensors)
    tree.load(unflatten(FlatState(tensors=tensors, plain=state.plain)), source=source)


class _OnlyMine(dict[str, Any]):
    """The tensors of other stages were not read: in the tree they are None."""

    def __missing__(self, name: str) -> None:
        return None
