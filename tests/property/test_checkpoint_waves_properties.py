"""Waves, portions and pieces cover a state once, in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.arena import drop_slot, make_slot
from everstep.checkpoint.image import Content, lay_out
from everstep.checkpoint.pieces import batches_of, pieces_of, waves


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 80))
def test_portions_cover_the_data_once_and_in_order(
    data_bytes: int, slot_bytes: int, portion_bytes: int
) -> None:
    all_waves = list(waves(data_bytes, slot_bytes, portion_bytes=portion_bytes))
    at = 0
    for wave in all_waves:
        slot_at = 0
        for portion in wave:
            assert (portion.at, portion.slot_at) == (at, slot_at)
            at += portion.size_bytes
            slot_at += portion.size_bytes
        assert slot_at <= slot_bytes
        assert [portion.is_last_of_slot for portion in wave] == [False] * (len(wave) - 1) + [True]
    assert at == data_bytes
    flat = [portion for wave in all_waves for portion in wave]
    assert [portion.is_last for portion in flat] == [False] * (len(flat) - 1) + [True]


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 200), st.integers(1, 90))
def test_pieces_copy_every_byte_to_its_place(
    lengths: list[int], slot_bytes: int, piece_bytes: int
) -> None:
    tensors = {
        f"t{number}": torch.arange(number, number + length).to(torch.uint8)
        for number, length in enumerate(lengths)
    }
    image = lay_out(
        Content(name=name, dtype="U8", shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    copied = b""
    slot = make_slot(0, 4096, is_pinned=False)
    for wave in waves(image.data_bytes, slot_bytes, portion_bytes=2 * piece_bytes):
        slot.memory.zero_()
        for portion in wave:
            cut = list(pieces_of(image, tensors, slot, portion, piece_bytes=piece_bytes))
            for batch in batches_of(cut, piece_bytes=piece_bytes):
                for piece in batch:
                    piece.copy()
        filled = wave[-1].slot_at + wave[-1].size_bytes
        copied += slot.memory[:filled].numpy().tobytes()
    drop_slot(slot, is_pinned=False)
    wanted = (tensors[placed.content.name].numpy().tobytes() for placed in image.placed)
    assert copied == b"".join(wanted)
