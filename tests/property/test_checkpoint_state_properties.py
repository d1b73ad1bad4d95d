"""States and documents come back as they were, whatever they are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.image import PAGE_BYTES, Content, lay_out
from everstep.checkpoint.layout import Box, Layout, Part, names_to_write, overlap
from everstep.checkpoint.manifest import (
    BadDocument,
    PartRecord,
    TensorRecord,
    join_parts,
    seal,
    unseal_manifest,
    unseal_part,
)
from everstep.checkpoint.raw import dtype_name
from everstep.checkpoint.state import FlatState, flatten, join_plain, unflatten
from trees import is_same, raw, tensors, trees


@given(trees)
def test_a_tree_comes_back_with_its_types_through_json(tree: Any) -> None:
    flat = flatten(tree)
    plain = msgspec.json.decode(msgspec.json.encode(flat.plain))
    assert is_same(unflatten(FlatState(tensors=flat.tensors, plain=plain)), tree)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), trees, max_size=4))
def test_the_trees_of_parts_join_to_the_whole_tree(tree: dict[str, Any]) -> None:
    names = list(tree)
    halves = [{k: tree[k] for k in names[: len(names) // 2]}, {k: tree[k] for k in names[1:]}]
    joined = join_plain([flatten(half).plain for half in halves])
    whole = FlatState(tensors=flatten(tree).tensors, plain=joined)
    if len(names) > 1:
        assert is_same(dict(sorted(unflatten(whole).items())), dict(sorted(tree.items())))


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), tensors(), max_size=6))
def test_the_real_safetensors_reads_an_image(named: dict[str, torch.Tensor]) -> None:
    named.pop("__metadata__", None)
    image = lay_out(
        Content(name=name, dtype=dtype_name(t.dtype), shape=tuple(t.shape))
        for name, t in named.items()
    )
    data = b"".join(raw(named[placed.content.name]) for placed in image.placed)
    assert len(image.head) % PAGE_BYTES == 0
    assert len(data) == image.data_bytes
    read = safetensors.torch.load(image.head + data)
    assert read.keys() == named.keys()
    assert all(raw(read[name]) == raw(named[name]) for name in named)
    for placed in image.placed:
        assert placed.start % named[placed.content.name].dtype.itemsize == 0


_names = st.text(st.characters(codec="utf-8"), max_size=8)
_records = st.builds(
    TensorRecord,
    name=_names,
    dtype=st.sampled_from(["F32", "BF16"]),
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    start=st.integers(0, 2**62),
    size_bytes=st.integers(0, 2**62),
    checksums=st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), max_size=2).map(
        tuple
    ),
)
_plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), _names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_names, inner)),
    max_leaves=5,
)


def _part(index: int, of: int, tensors: Any, plain: Any) -> PartRecord:
    return PartRecord(
        format=1,
        step=3,
        run="r",
        index=index,
        of=of,
        file="f",
        file_bytes=1,
        head_bytes=1,
        head_checksum="0",
        tensors=tuple(tensors),
        plain=plain,
        about={"loss": 1.5},
    )


@given(st.lists(_records, max_size=3), _plain, st.data())
def test_a_sealed_document_comes_back_and_no_flipped_bit_passes(
    records: list[TensorRecord], plain: Any, data: st.DataObject
) -> None:
    part = _part(0, 1, records, plain)
    document = bytearray(seal(part))
    assert unseal_part(bytes(document)) == part
    position = data.draw(st.integers(0, 8 * len(document) - 1))
    document[position // 8] ^= 1 << position % 8
    with pytest.raises(BadDocument):
        unseal_part(bytes(document))


@given(st.permutations(range(4)))
def test_the_manifest_is_the_same_whoever_joins_the_parts(order: list[int]) -> None:
    parts = [_part(index, 4, [], index) for index in range(4)]
    joined = seal(join_parts([parts[index] for index in order]))
    assert joined == seal(join_parts(parts))
    assert unseal_manifest(joined).parts == tuple(parts)


@given(
    st.dictionaries(st.text(max_size=4), st.integers(0, 1000), max_size=12),
    st.sets(st.integers(0, 7), min_size=1, max_size=5),
    st.data(),
)
def test_of_equal_copies_exactly_one_part_writes_each_tensor(
    sizes: dict[str, int], copies: set[int], data: st.DataObject
) -> None:
    private = data.draw(st.frozensets(st.sampled_from(sorted(sizes)))) if sizes else frozenset()
    layout = Layout(copies=tuple(copies), private=private)
    written = [
        names_to_write(sizes, part=Part(index, 8, run="r"), layout=layout) for index in copies
    ]
    for name in sizes:
        num_writers = sum(name in names for names in written)
        assert num_writers == (len(copies) if name in private else 1)
    loads = [sum(sizes[name] for name in names - private) for names in written]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(st.data())
def test_the_overlap_of_boxes_is_what_they_have_in_common(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 3))
    axis = st.tuples(st.integers(0, 5), st.integers(0, 5))
    boxes = [data.draw(st.lists(axis, min_size=dims, max_size=dims)) for _ in range(2)]
    one, other = (Box(tuple(o for o, _ in b), tuple(n for _, n in b)) for b in boxes)
    whole = torch.zeros([11] * dims, dtype=torch.int8)
    whole[one.slices()] += 1
    whole[other.slices()] += 2
    common = overlap(one, other)
    assert int((whole == 3).sum()) == (common.num_elements if common else 0)
    if common:
        assert bool((whole[common.slices()] == 3).all())
