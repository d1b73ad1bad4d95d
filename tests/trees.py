"""Trees of state for tests: hypothesis strategies, and an equality that looks at types and bits."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any type, empty and scalar ones, strided ones, conjugated ones."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    size_bytes = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, size_bytes)
    filled = torch.tensor(data, dtype=torch.uint8)
    tensor = filled.view(dtype).reshape(shape) if size_bytes else torch.empty(shape, dtype=dtype)
    if draw(st.booleans()):
        tensor = tensor.t() if tensor.dim() == 2 else tensor[..., ::2] if tensor.dim() else tensor
    return tensor.conj() if dtype is torch.complex64 and draw(st.booleans()) else tensor


_texts = st.text(st.characters(codec="utf-8"), max_size=6)
_keys = st.one_of(_texts, st.integers(), st.booleans(), st.sampled_from(["0", 0, "a/b", "%2F"]))
_leaves = st.one_of(
    tensors(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    _texts,
    st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.Size([2, 3]), torch.device("cpu")]),
    st.builds(lambda values: np.array(values, dtype=np.uint32), st.lists(st.integers(0, 9))),
    st.builds(lambda grad: torch.nn.Parameter(torch.ones(2), requires_grad=grad), st.booleans()),
)


def _versioned(items: dict[Any, Any]) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(items)
    ordered._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    return ordered


trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=3),
        st.dictionaries(_texts, inner, max_size=3).map(OrderedDict),
        st.dictionaries(_texts, inner, max_size=2).map(_versioned),
    ),
    max_leaves=12,
)


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def is_same(one: Any, other: Any) -> bool:  # noqa: PLR0911 one per kind
    """Equal types all the way down, equal bits in tensors and floats, equal order of keys."""
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            is_alike = (one.dtype, one.shape, one.requires_grad) == (
                other.dtype,
                other.shape,
                other.requires_grad,
            )
            return is_alike and raw(one) == raw(other)
        case np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case float():
            same_bits = struct.pack("d", one) == struct.pack("d", other)
            return same_bits or (math.isnan(one) and math.isnan(other))
        case dict():
            has_same_keys = [(type(k), k) for k in one] == [(type(k), k) for k in other]
            has_same_extra = is_same(getattr(one, "_metadata", 0), getattr(other, "_metadata", 0))
            return has_same_keys and has_same_extra and all(is_same(one[k], other[k]) for k in one)
        case list() | tuple() if type(one) is not torch.Size:
            return len(one) == len(other) and all(map(is_same, one, other))
        case _:
            return bool(one == other)
