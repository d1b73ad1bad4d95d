"""States for checkpoint tests in which a mix of two steps shows at once."""

from __future__ import annotations

import torch

from everstep.checkpoint.restore import Found
from everstep.checkpoint.state import FlatState, flatten, unflatten

SHAPES = {"model/a": (64, 33), "model/b": (1000,), "optimizer/m": (7, 5, 3), "scalar": ()}


def state_of(
    step: int, *, salt: int = 0, repeat: int = 1, scale: int = 1, prefix: str = ""
) -> FlatState:
    """Every element of every tensor says the step it is of. Large by `scale`."""
    tree = {
        f"{prefix}{name}-{number}": torch.full((*shape, scale), float(step * 1000 + salt))
        for name, shape in SHAPES.items()
        for number in range(repeat)
    }
    return flatten({"step": step, "salt": salt, "tensors": tree})


def what_is_in(found: Found) -> tuple[int, int]:
    """The step and the salt of a checkpoint; fails when any element is of another one."""
    tree = unflatten(found.read())
    step, salt = tree["step"], tree["salt"]
    assert found.step == step
    for name, tensor in tree["tensors"].items():
        assert bool((tensor == float(step * 1000 + salt)).all()), f"{name} is mixed: {tensor}"
    return step, salt
