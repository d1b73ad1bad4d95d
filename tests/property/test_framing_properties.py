from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everstep.comm.framing import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    Bye,
    Direction,
    Header,
    Hello,
    Payload,
    Refusal,
    Refused,
    TensorSpec,
    Welcome,
    check_payload,
    decode,
    encode,
    header_bytes,
)
from everstep.comm.reading import End, Message, Source, messages
from everstep.comm.streams import host_copy, memory_of, spec_of
from everstep.core.errors import ProtocolBroken
from everstep.core.ids import WorkerId

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
specs = st.builds(TensorSpec, dtype=st.sampled_from(sorted(DTYPE_BYTES)), shape=shapes)
texts = st.text(st.characters(codec="utf-8"), max_size=30)
payloads = st.builds(
    Payload, key=texts, structure=texts, tensors=st.lists(specs, max_size=4).map(tuple)
)
workers = st.builds(WorkerId, st.integers(0, 999), st.integers(0, 999))
hellos = st.builds(
    Hello,
    version=st.integers(0, 9),
    generation=st.integers(0, 1 << 40),
    token=texts,
    sender=workers,
    direction=st.sampled_from(Direction),
)
headers: st.SearchStrategy[Header] = st.one_of(
    payloads,
    hellos,
    st.builds(Refused, reason=st.sampled_from(Refusal)),
    st.just(Welcome()),
    st.just(Bye()),
)


def tensor_of(spec: TensorSpec, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if spec.dtype == "bool" else 256
    content = torch.randint(high, (spec.num_bytes,), dtype=torch.uint8, generator=generator)
    return content.view(getattr(torch, spec.dtype)).reshape(spec.shape)


def frame(key: str, structure: str, tensors: list[Tensor]) -> bytes:
    header = Payload(key=key, structure=structure, tensors=tuple(map(spec_of, tensors)))
    return encode(header) + b"".join(bytes(memory_of(tensor)) for tensor in tensors)


def read_all(pieces: list[bytes]) -> Iterator[Message | End]:
    """What a reader makes of bytes that arrive in these pieces, and then the end of the stream."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        found = messages(Source(receiver))
        for piece in pieces:
            sender.sendall(piece)
            while (item := next(found)) is not None:
                yield item
                if isinstance(item, End):
                    return
        sender.close()
        yield from (item for item in found if item is not None)


def cut_at(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]


@given(header=headers)
def test_every_header_reads_back_as_it_was(header: Header) -> None:
    data = encode(header)
    assert header_bytes(data[:PREFIX_BYTES]) == len(data) - PREFIX_BYTES
    assert decode(data[PREFIX_BYTES:]) == header


@given(
    key=texts,
    structure=texts,
    specs=st.lists(specs, max_size=3),
    seed=st.integers(0, 99),
    places=st.lists(st.integers(0, 10_000), max_size=6),
)
def test_messages_survive_however_the_stream_cuts_them(
    key: str, structure: str, specs: list[TensorSpec], seed: int, places: list[int]
) -> None:
    tensors = [tensor_of(spec, seed) for spec in specs]
    data = frame(key, structure, tensors) + frame("next", "", [])
    first, second, end = read_all(cut_at(data, places))
    assert isinstance(first, Message)
    assert (first.key, first.structure) == (key, structure)
    assert [spec_of(tensor) for tensor in first.tensors] == specs
    for found, sent in zip(first.tensors, tensors, strict=True):
        assert bytes(memory_of(found)) == bytes(memory_of(sent))
    assert isinstance(second, Message)
    assert isinstance(end, End)
    assert "between two messages" in end.cause


@given(payload=payloads, seed=st.integers(0, 99), place=st.integers(1, 10_000))
def test_a_truncated_message_is_never_delivered(payload: Payload, seed: int, place: int) -> None:
    data = frame(payload.key, "", [tensor_of(spec, seed) for spec in payload.tensors])
    (end,) = read_all([data[: 1 + place % (len(data) - 1)]])
    assert isinstance(end, End)
    assert "in the middle of a message" in end.cause


@given(length=st.integers(MAX_HEADER_BYTES + 1, (1 << 32) - 1))
def test_an_oversized_header_is_refused_before_it_is_read(length: int) -> None:
    (end,) = read_all([struct.pack("<I", length)])
    assert isinstance(end, End)
    assert end.is_violation
    assert str(length) in end.cause


@given(body=st.binary(max_size=64))
def test_bytes_that_are_no_header_are_a_violation_and_nothing_else(body: bytes) -> None:
    try:
        header = decode(body)
    except ProtocolBroken:
        return
    assert isinstance(header, Hello | Welcome | Refused | Payload | Bye)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (TensorSpec(dtype="float32", shape=(MAX_PAYLOAD_BYTES // 4 + 1,)), "payload of"),
        (TensorSpec(dtype="float32", shape=(-1,)), "impossible shape"),
        (TensorSpec(dtype="float32", shape=(0, 1 << 62, 1 << 62)), "impossible shape"),
        (TensorSpec(dtype="float32", shape=(1,) * 65), "impossible shape"),
        (TensorSpec(dtype="load", shape=(1,)), "unknown element type 'load'"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(spec: TensorSpec, what: str) -> None:
    with pytest.raises(ProtocolBroken, match=what):
        check_payload(Payload(key="", structure="", tensors=(spec,)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.zeros(0, 3),
        torch.tensor(2.5, requires_grad=True),
    ],
)
def test_what_is_sent_is_the_value_whatever_the_memory_looks_like(tensor: Tensor) -> None:
    message, _ = read_all([frame("key", "", [host_copy(tensor)])])
    assert isinstance(message, Message)
    assert torch.equal(message.tensors[0], tensor)
