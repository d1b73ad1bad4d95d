"""A copy that two threads share."""

from __future__ import annotations

import pytest
import torch

from everstep.checkpoint.arena import Arena, make_slot
from everstep.checkpoint.copier import Copy, SaveFailed, check_unchanged, versions_of
from everstep.checkpoint.image import Content, lay_out
from everstep.checkpoint.pieces import Piece


def a_copy(tensors: dict[str, torch.Tensor]) -> Copy:
    image = lay_out(
        Content(name=name, dtype="F32", shape=tuple(t.shape)) for name, t in tensors.items()
    )
    versions = versions_of(tensors)
    return Copy(number=0, image=image, tensors=tensors, own_slot=0, versions=versions)


def test_a_tensor_that_was_changed_in_place_is_noticed() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(3)}
    copy = a_copy(tensors)
    check_unchanged(copy)
    torch._foreach_add_([tensors["b"]], 1.0)
    with pytest.raises(SaveFailed, match="b changed while it was copied"):
        check_unchanged(copy)


def test_a_trainer_that_waits_copies_what_nobody_has_taken() -> None:
    source = torch.arange(4.0)
    copy = a_copy({"a": source})
    slot = make_slot(0, 4096)
    copy.lend([[Piece(source, 0, 16, slot, 8)]], ends_with=copy.release)
    assert copy.wait_released(1.0)
    assert slot.memory[8:24].view(torch.float32).tolist() == [0.0, 1.0, 2.0, 3.0]
    copy.wait_copied(0)
    slot.close()


def test_what_fails_while_the_trainer_helps_is_the_copiers_trouble() -> None:
    class Broken(Piece):
        def copy(self, *, has_pool: bool = False) -> None:  # noqa: ARG002
            raise MemoryError("no room")

    copy = a_copy({"a": torch.zeros(1)})
    slot = make_slot(0, 4096)
    copy.lend([[Broken(torch.zeros(1), 0, 4, slot, 0)]])
    assert not copy.wait_released(0.01)
    with pytest.raises(MemoryError):
        copy.wait_copied(0)
    slot.close()


def test_a_slot_is_in_one_hand_at_a_time() -> None:
    arena = Arena(num_slots=2, max_slot_bytes=10_000)
    assert [arena.take(), arena.take(), arena.take()] == [0, 1, None]
    arena.give_back(1)
    assert arena.take() == 1
    assert arena.slot_bytes(5000) == 8192
    assert arena.slot_bytes(50_000) == 12_288
    assert arena.slot_bytes(0) == 4096


def test_the_memory_of_a_slot_is_reused_until_it_is_too_small() -> None:
    arena = Arena(num_slots=1, max_slot_bytes=1 << 24)
    first = arena.memory(0, wanted_bytes=8192, device=None)
    assert arena.memory(0, wanted_bytes=100, device=None) is first
    larger = arena.memory(0, wanted_bytes=3_000_000, device=None)
    assert larger is not first
    assert larger.size_bytes >= 3_000_000
    assert arena.copy_bytes_per_s > 0
    arena.close()


def test_a_state_that_has_grown_a_little_needs_no_new_slot() -> None:
    """The losses in a checkpoint grow from save to save: each time a slot of gigabytes was made
    anew for a few bytes, and the one that was prepared ahead was never used."""
    arena = Arena(num_slots=1, max_slot_bytes=1 << 24)
    first = arena.memory(0, wanted_bytes=8192, device=None)
    assert arena.memory(0, wanted_bytes=8192 + 16_384, device=None) is first
    arena.close()


def test_no_slot_is_larger_than_its_bound() -> None:
    arena = Arena(num_slots=1, max_slot_bytes=10_000)
    assert arena.memory(0, wanted_bytes=50_000, device=None).size_bytes == 12_288
    arena.close()
