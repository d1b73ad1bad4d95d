from __future__ import annotations

import pytest

from everstep.comm.admission import Admit, Expected, Park, Refuse, admission
from everstep.comm.framing import Direction, Hello, Refusal
from everstep.core.ids import WorkerId

PEER = WorkerId(0, 1)
CHANNEL = (PEER, Direction.ACTIVATION)
EXPECTED = Expected(generation=3, token="secret", channels=frozenset({CHANNEL}))


def hello(
    *,
    generation: int = 3,
    token: str = "secret",
    direction: Direction = Direction.ACTIVATION,
    version: int = 1,
) -> Hello:
    return Hello(
        version=version, generation=generation, token=token, sender=PEER, direction=direction
    )


def test_an_expected_channel_of_the_open_generation_is_admitted() -> None:
    assert admission(hello(), over=2, expected=EXPECTED, arrived=()) == Admit()


@pytest.mark.parametrize("expected", [EXPECTED, None])
def test_a_generation_that_is_not_open_yet_is_parked(expected: Expected | None) -> None:
    assert admission(hello(generation=4), over=2, expected=expected, arrived=()) == Park()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (hello(generation=2), Refusal.OVER),
        (hello(token="guess"), Refusal.TOKEN),
        (hello(token="\N{SNOWMAN}"), Refusal.TOKEN),
        (hello(direction=Direction.GRADIENT), Refusal.UNEXPECTED),
        (hello(version=2), Refusal.VERSION),
    ],
)
def test_what_does_not_belong_is_refused_with_the_reason(said: Hello, reason: Refusal) -> None:
    assert admission(said, over=2, expected=EXPECTED, arrived=()) == Refuse(reason)


def test_a_second_connection_for_the_same_channel_is_refused() -> None:
    verdict = admission(hello(), over=2, expected=EXPECTED, arrived={CHANNEL})
    assert verdict == Refuse(Refusal.DUPLICATE)
