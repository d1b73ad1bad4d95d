from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everstep.execute.boundary import flatten, gradients_flow, unflatten
from everstep.execute.split import balance


def best_by_trying_all(costs: list[int], num_stages: int) -> int:
    inner = range(1, len(costs))
    return min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(inner, num_stages - 1)
    )


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_smaller_largest_slice(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    pieces = balance(costs, num_stages)
    assert [index for piece in pieces for index in piece] == list(range(len(costs)))
    assert len(pieces) == num_stages
    assert all(pieces)
    largest = max(sum(costs[index] for index in piece) for piece in pieces)
    assert largest == best_by_trying_all(costs, num_stages)


tensors = st.builds(
    lambda shape, needs_gradient: torch.zeros(shape, requires_grad=needs_gradient),
    st.lists(st.integers(0, 3), max_size=3),
    st.booleans(),
)
constants = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    tensors | constants,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_leaves=12,
)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    return bool(a == b)


@given(value=values)
def test_a_boundary_value_survives_the_way(value: Any) -> None:
    found, structure = flatten(value)
    json.loads(structure)
    assert is_same(unflatten(found, structure), value)
    assert gradients_flow(structure) == [tensor.requires_grad for tensor in found]
