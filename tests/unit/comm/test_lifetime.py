from __future__ import annotations

import pytest

from everstep.comm.lifetime import Lifetime
from everstep.core.errors import GenerationEnded


def test_ending_twice_runs_each_callback_once() -> None:
    calls: list[str] = []
    lifetime = Lifetime(7)
    lifetime.on_end(lambda: calls.append("freed"))
    lifetime.end()
    lifetime.end()
    assert calls == ["freed"]


def test_what_registers_after_the_end_is_freed_at_once() -> None:
    calls: list[str] = []
    lifetime = Lifetime(7)
    lifetime.end()
    lifetime.on_end(lambda: calls.append("freed"))
    assert calls == ["freed"]


def test_a_block_that_was_left_is_not_freed() -> None:
    calls: list[str] = []
    lifetime = Lifetime(7)
    with lifetime.freeing(lambda: calls.append("freed")):
        pass
    lifetime.end()
    assert calls == []


def test_checking_names_the_generation_that_has_ended() -> None:
    lifetime = Lifetime(7)
    lifetime.check()
    lifetime.end()
    with pytest.raises(GenerationEnded, match="generation 7 has ended"):
        lifetime.check()
