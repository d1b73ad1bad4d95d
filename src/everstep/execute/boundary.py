"""What crosses from one stage to the next: a nesting of tensors, as a list and a short text.

The text is JSON, so nothing on the wire is ever executed:

    tensor    1 if a gradient flows back through it, else 0
    tuple     ["tuple", ...]        list    ["list", ...]        dict    {"key": ...}
    constant  ["constant", 0.5]     None    null
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from everstep.core.errors import ConfigError

_SEQUENCES = {tuple: "tuple", list: "list"}


def flatten(value: object) -> tuple[list[Tensor], str]:
    """The tensors of `value` in order, and the text that `unflatten` builds it from again."""
    tensors: list[Tensor] = []
    shape = _describe(value, tensors)
    return tensors, json.dumps(shape, separators=(",", ":"))


def unflatten(tensors: list[Tensor], structure: str) -> Any:
    remaining = iter(tensors)
    value = _rebuild(json.loads(structure), remaining)
    left_over = sum(1 for _ in remaining)
    if left_over:
        raise ValueError(f"{len(tensors)} tensors for a structure that takes {left_over} fewer")
    return value


def gradients_flow(structure: str) -> list[bool]:
    """For each tensor of the structure, in order: does a gradient flow back through it?"""
    return list(_leaves(json.loads(structure)))


def _describe(value: object, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return int(value.requires_grad)
    if value is None:
        return None
    if type(value) in _SEQUENCES:
        assert isinstance(value, tuple | list)
        return [_SEQUENCES[type(value)], *(_describe(item, tensors) for item in value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _describe(item, tensors) for key, item in value.items()}
    if isinstance(value, bool | int | float | str):
        return ["constant", value]
    raise ConfigError(
        "a value between two stages",
        f"a {type(value).__name__}",
        "must be tensors, numbers, strings and None in tuples, lists and dicts with string keys",
    )


def _rebuild(shape: Any, tensors: Iterator[Tensor]) -> Any:
    match shape:
        case None:
            return None
        case 0 | 1:
            tensor = next(tensors, None)
            if tensor is None:
                raise ValueError("fewer tensors than the structure takes")
            return tensor
        case ["constant", value]:
            return value
        case ["tuple", *items]:
            return tuple(_rebuild(item, tensors) for item in items)
        case ["list", *items]:
            return [_rebuild(item, tensors) for item in items]
        case dict():
            return {key: _rebuild(item, tensors) for key, item in shape.items()}
        case _:
            raise ValueError(f"no structure of a boundary value: {shape!r:.80}")


def _leaves(shape: Any) -> Iterator[bool]:
    match shape:
        case 0 | 1:
            yield bool(shape)
        case ["tuple" | "list", *items]:
            for item in items:
                yield from _leaves(item)
        case dict():
            for item in shape.values():
                yield from _leaves(item)
        case _:
            return


def without_gaps(gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], str]:
    """The gradients that there are, and which they are: `x-x` for three of which one is missing."""
    present = [gradient for gradient in gradients if gradient is not None]
    return present, "".join("-" if gradient is None else "x" for gradient in gradients)


def with_gaps(present: Sequence[Tensor], gaps: str) -> list[Tensor | None]:
    remaining = iter(present)
    return [next(remaining) if mark == "x" else None for mark in gaps]
