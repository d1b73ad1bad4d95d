from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from everstep.execute.data import SampleOrder


@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    num_steps=st.integers(1, 12),
    shuffle=st.booleans(),
)
def test_no_sample_is_used_twice_before_all_were_used_once(
    num_samples: int, batch_size: int, seed: int, num_steps: int, shuffle: bool
) -> None:
    batch_size = min(batch_size, num_samples)
    order = SampleOrder(num_samples=num_samples, batch_size=batch_size, seed=seed, shuffle=shuffle)
    used = [sample for step in range(num_steps) for sample in order.samples_of_step(step)]
    assert len(used) == num_steps * batch_size
    for start in range(0, len(used), num_samples):
        one_pass = used[start : start + num_samples]
        assert max(Counter(one_pass).values()) == 1
        assert set(one_pass) <= set(range(num_samples))


@given(
    replicas=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    size=st.integers(1, 3),
    step=st.integers(0, 50),
)
def test_the_slices_of_a_step_are_its_samples_cut_in_order(
    replicas: int, microbatches: int, size: int, step: int
) -> None:
    batch_size = replicas * microbatches * size
    order = SampleOrder(num_samples=batch_size + 5, batch_size=batch_size)
    slices = [
        order.slice_of(step, replica, number, replicas, microbatches)
        for replica in range(replicas)
        for number in range(microbatches)
    ]
    assert sum(slices, ()) == order.samples_of_step(step)
    assert {len(part) for part in slices} == {size}
