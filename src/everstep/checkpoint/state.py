"""A tree of state_dicts as named tensors and plain JSON, and back with the exact types.

    {"model": {"w": T}, "step": 3, "betas": (0.9, math.inf)}

    tensors  {"model/w": T}
    plain    {"dict": {"model": {"dict": {"w": {"tensor": "model/w"}}}, "step": 3,
              "betas": {"tuple": [0.9, {"float": "inf"}]}}}

Knows nothing of files. Tensors are not copied: whoever keeps a FlatState sees later updates.
Invariant: unflatten(flatten(tree)) equals the tree, or flatten raises and names the path.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from everstep.checkpoint.raw import has_name
from everstep.core.errors import StateNotSavable

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
Tree: TypeAlias = Any
"""What state_dict() returns: the one place where any object may come in."""

_LARGEST_INT = 2**53
"""Beyond it, readers of JSON in other languages lose digits: such numbers are written as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    tensors: Mapping[str, torch.Tensor]
    plain: JSON = None
    volatile: frozenset[str] = frozenset()
    """Tensors that the next forward pass may change (buffers): copied before `save` returns."""


@dataclass(slots=True)
class _Flattening:
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        name = wanted = _name(path)
        number = 1
        while name in self.tensors:  # 0 and "0" are different keys and the same name
            name, number = f"{wanted}~{number}", number + 1
        self.tensors[name] = tensor
        return name


def flatten(tree: Tree, *, volatile: Sequence[str] = ()) -> FlatState:
    """`volatile`: names, or beginnings of names up to a "/", that forward passes change."""
    work = _Flattening()
    plain = _node(tree, (), work)
    starts = tuple(f"{name}/" for name in volatile)
    return FlatState(
        tensors=work.tensors,
        plain=plain,
        volatile=frozenset(
            name for name in work.tensors if name in volatile or name.startswith(starts)
        ),
    )


def unflatten(state: FlatState) -> Tree:
    return _tree(state.plain, state.tensors)


def join_plain(plains: Sequence[JSON]) -> JSON:
    """One tree of several parts' trees: dicts are joined key by key; else the first one's word."""
    first, *others = plains
    for other in others:
        first = _joined(first, other)
    return first


def _joined(one: JSON, other: JSON) -> JSON:
    match one, other:
        case ({"dict": dict(a)}, {"dict": dict(b)}):
            both = {key: _joined(a[key], b[key]) if key in b else a[key] for key in a}
            return {"dict": both | {key: b[key] for key in b if key not in a}}
        case ({"ordered": a, "metadata": c}, {"ordered": b, "metadata": d}):
            return {"ordered": _joined(a, b), "metadata": _joined(c, d)}
        case ({"ordered": a}, {"ordered": b}):
            return {"ordered": _joined(a, b)}
        case ({"items": list(a)}, {"items": list(b)}):
            known = [item[0] for item in a if isinstance(item, list)]
            more = [item for item in b if isinstance(item, list) and item[0] not in known]
            return {"items": [*a, *more]}
        case _:
            return one


def _name(path: tuple[str, ...]) -> str:
    # "/" joins keys, so a "/" inside one must look different; "__metadata__" is safetensors' own.
    name = "/".join(key.replace("%", "%25").replace("/", "%2F") for key in path) or "tensor"
    return "%5F_metadata__" if name == "__metadata__" else name


def _node(value: Tree, path: tuple[str, ...], work: _Flattening) -> JSON:
    # Exact types only: a subclass would come back as its base.
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise StateNotSavable("/".join(path), kind=f"a {_type_name(value)}")
    return writer(value, path, work)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _int(value: int, _path: tuple[str, ...], _work: _Flattening) -> JSON:
    return value if abs(value) <= _LARGEST_INT else {"int": str(value)}


def _float(value: float, _path: tuple[str, ...], _work: _Flattening) -> JSON:
    return value if math.isfinite(value) else {"float": repr(value)}


def _str(value: str, path: tuple[str, ...], _work: _Flattening) -> JSON:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise StateNotSavable("/".join(path), kind="a string that is not Unicode") from None
    return value


def _list(value: Sequence[Tree], path: tuple[str, ...], work: _Flattening) -> list[JSON]:
    return [_node(item, (*path, str(number)), work) for number, item in enumerate(value)]


def _dict(value: Mapping[Any, Tree], path: tuple[str, ...], work: _Flattening) -> JSON:
    if all(type(key) is str for key in value):
        return {
            "dict": {
                str(_str(key, path, work)): _node(item, (*path, key), work)
                for key, item in value.items()
            }
        }
    return {
        "items": [
            [_node(key, (*path, "a key"), work), _node(item, (*path, str(key)), work)]
            for key, item in value.items()
        ]
    }


def _ordered(value: OrderedDict[Any, Tree], path: tuple[str, ...], work: _Flattening) -> JSON:
    node: dict[str, JSON] = {"ordered": _dict(value, path, work)}
    # Modules hang the versions of their formats on their state_dict, and look at them on loading.
    if hasattr(value, "_metadata"):
        node["metadata"] = _node(value._metadata, (*path, "_metadata"), work)
    return node


def _tensor(value: torch.Tensor, path: tuple[str, ...], work: _Flattening) -> JSON:
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise StateNotSavable("/".join(path), kind=f"a {value.layout} tensor on {value.device}")
    if not has_name(value.dtype):
        raise StateNotSavable("/".join(path), kind=f"a {value.dtype} tensor (safetensors has none)")
    return {"tensor": work.keep(value.detach(), path)}


def _parameter(value: torch.nn.Parameter, path: tuple[str, ...], work: _Flattening) -> JSON:
    return {"parameter": _tensor(value, path, work), "requires_grad": value.requires_grad}


def _array(value: np.ndarray[Any, Any], path: tuple[str, ...], work: _Flattening) -> JSON:
    try:
        # Copied: arrays are small (random states), and a copy is in torch's order and writable.
        return {"array": work.keep(torch.from_numpy(value.copy(order="C")), path)}
    except TypeError:
        raise StateNotSavable("/".join(path), kind=f"an array of {value.dtype}") from None


_Writer: TypeAlias = Callable[[Any, tuple[str, ...], _Flattening], JSON]

_WRITERS: dict[type, _Writer] = {
    type(None): lambda value, path, work: None,  # noqa: ARG005
    bool: lambda value, path, work: bool(value),  # noqa: ARG005
    int: _int,
    float: _float,
    str: _str,
    bytes: lambda value, path, work: {"bytes": base64.b64encode(value).decode()},  # noqa: ARG005
    list: _list,
    tuple: lambda value, path, work: {"tuple": _list(value, path, work)},
    dict: _dict,
    OrderedDict: _ordered,
    Counter: lambda value, path, work: {"counter": _dict(value, path, work)},  # MultiStepLR's
    torch.Tensor: _tensor,
    torch.nn.Parameter: _parameter,
    torch.Size: lambda value, path, work: {"size": list(value)},  # noqa: ARG005
    torch.dtype: lambda value, path, work: {"dtype": str(value).removeprefix("torch.")},  # noqa: ARG005
    torch.device: lambda value, path, work: {"device": str(value)},  # noqa: ARG005
    np.ndarray: _array,
}


def _tree(node: JSON, tensors: Mapping[str, torch.Tensor]) -> Tree:  # noqa: PLR0911 one per type
    match node:
        case list():
            return [_tree(item, tensors) for item in node]
        case {"dict": dict(items)}:
            return {key: _tree(item, tensors) for key, item in items.items()}
        case {"items": list(pairs)}:
            return dict(_tree(pair, tensors) for pair in pairs)
        case {"ordered": inner, "metadata": metadata}:
            ordered = OrderedDict(_tree(inner, tensors))
            ordered._metadata = _tree(metadata, tensors)  # type: ignore[attr-defined]
            return ordered
        case {"ordered": inner}:
            return OrderedDict(_tree(inner, tensors))
        case {"tuple": list(items)}:
            return tuple(_tree(item, tensors) for item in items)
        case {"parameter": inner, "requires_grad": requires_grad}:
            return torch.nn.Parameter(_tree(inner, tensors), requires_grad=bool(requires_grad))
        case dict():
            ((kind, value),) = node.items()
            return _LEAVES[kind](value, tensors)
        case _:
            return node


_LEAVES: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Tree]] = {
    "tensor": lambda name, tensors: tensors[name],
    "counter": lambda counts, tensors: Counter(_tree(counts, tensors)),
    "array": lambda name, tensors: tensors[name].numpy(),
    "float": lambda text, _: float(text),
    "int": lambda text, _: int(text),
    "bytes": lambda text, _: base64.b64decode(text),
    "size": lambda sizes, _: torch.Size(sizes),
    "dtype": lambda name, _: getattr(torch, name),
    "device": lambda name, _: torch.device(name),
}
