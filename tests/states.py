"""States for checkpoint tests in which a mix of two steps shows at once."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.layout import Part
from everstep.checkpoint.restore import Found
from everstep.checkpoint.state import FlatState, flatten, unflatten

PART_WITHIN_S = 60.0
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


def save_a_part(pipe: Connection, directory: Path) -> None:
    """In a process of its own: the first of two parts. Says so, and waits for the other."""
    engine = Engine(directory, part=Part(0, 2, run="r"), settings=EngineSettings(probe_bytes=0))
    engine.save(1, state_of(1))
    deadline_s = time.monotonic() + PART_WITHIN_S
    while not list(directory.glob(".step-*.partial/part-*")):
        assert time.monotonic() < deadline_s, f"no part in {PART_WITHIN_S} s"
        time.sleep(0.01)
    pipe.send(1)
    engine.wait(PART_WITHIN_S)
