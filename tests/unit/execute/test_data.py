from __future__ import annotations

import itertools
import threading
import traceback
from typing import Any

import pytest
import torch

from everstep.core.clock import ManualClock
from everstep.core.errors import ConfigError, DataStalled, UserCodeError
from everstep.execute.data import (
    Fetcher,
    Microbatch,
    SampleOrder,
    Slicing,
    _pinned,
    check_dataset,
)

WAIT_S = 30.0


class Squares:
    """dataset[i] = (i, i * i); remembers what was asked of it."""

    def __init__(self, length: int = 12) -> None:
        self.asked: list[int] = []
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.asked.append(index)
        return index, index * index


def in_order(batch_size: int = 4, microbatches: int = 2) -> Slicing:
    order = SampleOrder(num_samples=12, batch_size=batch_size, shuffle=False)
    return Slicing(order=order, replicas=1, microbatches=microbatches)


def upcoming(num_steps: int = 1000) -> list[Microbatch]:
    return [Microbatch(step, 0, number) for step in range(num_steps) for number in range(2)]


def test_without_shuffling_the_samples_wrap_round() -> None:
    order = SampleOrder(num_samples=5, batch_size=3, shuffle=False)
    assert [order.samples_of_step(step) for step in range(3)] == [(0, 1, 2), (3, 4, 0), (1, 2, 3)]


def test_each_pass_has_its_own_order_and_another_seed_another() -> None:
    order = SampleOrder(num_samples=32, batch_size=32)
    first, second = order.samples_of_step(0), order.samples_of_step(1)
    assert sorted(first) == sorted(second) == list(range(32))
    assert first != second
    assert first == SampleOrder(num_samples=32, batch_size=32).samples_of_step(0)
    assert first != SampleOrder(num_samples=32, batch_size=32, seed=1).samples_of_step(0)


def test_a_slice_is_the_numbered_part_of_the_step() -> None:
    order = SampleOrder(num_samples=50, batch_size=12)
    step = order.samples_of_step(7)
    assert order.slice_of(7, 1, 0, 2, 3) == step[6:8]
    with pytest.raises(ConfigError, match="2 x 5"):
        order.slice_of(7, 1, 0, 2, 5)


def test_a_dataset_shorter_than_one_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 samples long"):
        SampleOrder(num_samples=3, batch_size=4)


@pytest.mark.timeout(WAIT_S)
def test_the_fetcher_gives_inputs_and_targets_in_batches() -> None:
    with Fetcher(Squares(), in_order()) as fetcher:
        fetcher.expect(upcoming())
        for mb, samples in ((Microbatch(0, 0, 0), [0, 1]), (Microbatch(0, 0, 1), [2, 3])):
            inputs, target = fetcher.take(mb)
            assert inputs.tolist() == samples
            assert target.tolist() == [i * i for i in samples]


@pytest.mark.timeout(WAIT_S)
def test_only_the_part_asked_for_is_put_together() -> None:
    mb = Microbatch(0, 0, 0)
    with Fetcher(Squares(), in_order(), parts=["target"]) as fetcher:
        inputs, target = fetcher.take(mb)
    assert inputs is None
    assert target.tolist() == [0, 1]


class Gated(Squares):
    """Gives a sample only after the test has let it."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.reached.release()
        assert self.permits.acquire(timeout=WAIT_S)
        return super().__getitem__(index)


@pytest.mark.timeout(WAIT_S)
def test_the_look_ahead_is_bounded() -> None:
    dataset = Gated()
    with Fetcher(dataset, in_order(), look_ahead=2) as fetcher:
        fetcher.expect(upcoming())
        dataset.permits.release(1000)
        for mb in upcoming(3):
            fetcher.take(mb)
            # Six samples at most: two micro-batches ahead, and the one under way.
            assert len(dataset.asked) <= 2 * (2 * mb.step + mb.number + 1) + 6


@pytest.mark.timeout(WAIT_S)
def test_a_microbatch_that_nobody_expected_comes_next() -> None:
    dataset = Squares()
    adopted = Microbatch(2, 0, 1)
    with Fetcher(dataset, in_order(), look_ahead=1) as fetcher:
        fetcher.expect(upcoming())
        assert fetcher.take(adopted)[0].tolist() == [10, 11]
        for mb in upcoming(5):
            if mb != adopted:
                fetcher.take(mb)


@pytest.mark.timeout(WAIT_S)
def test_a_new_expectation_replaces_the_old_one_even_while_fetching() -> None:
    dataset = Gated()
    with Fetcher(dataset, in_order(), look_ahead=1) as fetcher:
        fetcher.expect(upcoming())
        assert dataset.reached.acquire(timeout=WAIT_S)
        fetcher.expect(itertools.islice(upcoming(), 4, None))
        dataset.permits.release(1000)
        for mb in upcoming(5)[4:]:
            assert fetcher.take(mb)[0][0] == (4 * mb.step + 2 * mb.number) % 12


@pytest.mark.timeout(WAIT_S)
def test_the_time_a_slow_dataset_costs_is_counted() -> None:
    clock = ManualClock()

    class Slow(Squares):
        def __getitem__(self, index: int) -> tuple[int, int]:
            clock.advance(1.5)
            return super().__getitem__(index)

    with Fetcher(Slow(), in_order(), clock=clock) as fetcher:
        fetcher.take(Microbatch(0, 0, 0))
        assert fetcher.waited_s == 3.0


@pytest.mark.timeout(WAIT_S)
def test_an_error_in_the_dataset_reaches_the_caller_with_its_index_and_traceback() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[int, int]:
            if index == 3:
                raise KeyError("no such row")
            return super().__getitem__(index)

    with Fetcher(Broken(), in_order()) as fetcher:
        fetcher.expect(upcoming())
        fetcher.take(Microbatch(0, 0, 0))
        with pytest.raises(UserCodeError, match=r"dataset\[3\] raised KeyError") as caught:
            fetcher.take(Microbatch(0, 0, 1))
        assert isinstance(caught.value.__cause__, KeyError)
        assert "no such row" in "".join(traceback.format_exception(caught.value))
        assert "in __getitem__" in "".join(traceback.format_exception(caught.value))


@pytest.mark.timeout(WAIT_S)
def test_samples_of_different_shapes_are_named() -> None:
    class Ragged(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(index), 0

    with (
        Fetcher(Ragged(), in_order()) as fetcher,
        pytest.raises(UserCodeError, match="the inputs of samples 0, 1"),
    ):
        fetcher.take(Microbatch(0, 0, 0))


@pytest.mark.timeout(WAIT_S)
def test_a_stuck_dataset_is_named_after_the_timeout() -> None:
    dataset = Gated()
    with Fetcher(dataset, in_order()) as fetcher:
        with pytest.raises(DataStalled, match="micro-batch 0 of replica 0 in step 0"):
            fetcher.take(Microbatch(0, 0, 0), timeout_s=0.01)
        dataset.permits.release(1000)


@pytest.mark.timeout(WAIT_S)
def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    fetcher = Fetcher(Squares(), in_order())
    assert threading.active_count() == before + 1
    fetcher.close()
    assert threading.active_count() == before


def test_a_dataset_that_draws_from_the_global_generator_is_refused() -> None:
    class Noisy(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.randn(2), index

    state = torch.default_generator.get_state()
    with pytest.raises(ConfigError, match="must be a function of i"):
        check_dataset(Noisy())
    assert torch.equal(state, torch.default_generator.get_state())
    check_dataset(Squares())


def test_a_sample_that_is_no_pair_is_refused() -> None:
    class Single(Squares):
        def __getitem__(self, index: int) -> Any:
            return index

    with pytest.raises(ConfigError, match=r"must be a pair \(input, target\)"):
        check_dataset(Single())


def test_batches_that_are_on_a_device_already_are_not_page_locked() -> None:
    """torch refuses to: the fetching thread would have died, and training waited ten minutes."""
    there = {"pixels": torch.empty(3, device="meta")}
    assert _pinned(there)["pixels"] is there["pixels"]
