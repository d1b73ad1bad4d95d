"""The first signal is noted, the second passed on; whoever was there before gets both."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from everstep.checkpoint.signals import Signals


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the handler that was there before gets."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_kept_until_it_is_passed_on(
    heard: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    signals = Signals()
    signals.start()
    signal.raise_signal(signal.SIGTERM)
    assert signals.received == signal.SIGTERM
    assert heard == []
    assert "SIGTERM: saving once more" in capfd.readouterr().err
    signals.pass_on(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert signals.received is None
    signals.stop()


def test_the_second_signal_is_passed_on_at_once(heard: list[int]) -> None:
    signals = Signals()
    signals.start()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    signals.stop()


def test_ctrl_c_twice_is_a_keyboard_interrupt() -> None:
    signals = Signals()
    signals.start()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signals.stop()


def test_what_was_there_before_comes_back(heard: list[int]) -> None:
    signals = Signals()
    signals.start()
    signals.stop()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    assert signals.received is None


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = Signals()
    signals.start()
    signal.raise_signal(signal.SIGINT)
    assert signals.received is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signals.stop()
    signal.signal(signal.SIGINT, before)
