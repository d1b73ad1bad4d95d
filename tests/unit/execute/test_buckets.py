from __future__ import annotations

import torch
from torch import nn
from torch.nn import Parameter

from everstep.execute.buckets import GradientBuckets


def params(*sizes: int) -> list[Parameter]:
    return [Parameter(torch.ones(size)) for size in sizes]


def test_buckets_fill_from_the_last_parameter_up_to_their_size() -> None:
    a, b, c, d = params(10, 10, 10, 50)
    buckets = GradientBuckets([a, b, c, d], bucket_bytes=80)
    assert [bucket.params for bucket in buckets.buckets] == [(d,), (c, b), (a,)]
    assert [buckets.bucket_of(param) for param in (a, b, c, d)] == [2, 1, 1, 0]
    assert [bucket.gradients.numel() for bucket in buckets.buckets] == [50, 20, 10]


def test_each_dtype_has_its_own_buckets_and_frozen_parameters_have_none() -> None:
    single, half = Parameter(torch.ones(3)), Parameter(torch.ones(3, dtype=torch.bfloat16))
    frozen = Parameter(torch.ones(3), requires_grad=False)
    buckets = GradientBuckets([single, half, frozen])
    assert [buffer.dtype for buffer in buckets.buffers] == [torch.bfloat16, torch.float32]
    assert frozen.grad is None


def test_gradients_accumulate_inside_the_buffer() -> None:
    layer = nn.Linear(3, 2)
    buckets = GradientBuckets(layer.parameters())
    for _ in range(2):  # the gradients of one step are not those of the next
        buckets.begin()
        for _ in range(2):
            layer(torch.ones(1, 3)).sum().backward()
            for param in buckets.params:
                buckets.accumulated(param)
        assert buckets.buckets[0].gradients.tolist() == [2.0] * 8


def test_given_gradients_are_added_like_those_of_autograd() -> None:
    (a,) = params(3)
    buckets = GradientBuckets([a])
    for _ in range(2):
        buckets.begin()
        buckets.add(a, torch.ones(3))
        buckets.add(a, torch.ones(3))
        assert buckets.buckets[0].gradients.tolist() == [2.0] * 3


def test_sparse_gradients_take_their_place_in_the_buffer() -> None:
    """Autograd adds a sparse gradient to a dense one out of place, so `param.grad` was no longer
    the view and the bucket was reduced without it: the embedding was silently not trained.
    """
    table = nn.Embedding(4, 2, sparse=True)
    buckets = GradientBuckets(table.parameters())
    buckets.begin()
    for index in (1, 3):
        table(torch.tensor([index])).sum().backward()
        for param in buckets.params:
            buckets.accumulated(param)
    assert buckets.buckets[0].gradients.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_reattach_makes_the_gradient_a_view_again() -> None:
    (a,) = params(3)
    buckets = GradientBuckets([a])
    a.grad = torch.ones(3)
    buckets.reattach()
    assert a.grad is not None
    a.grad += 5
    assert buckets.buckets[0].gradients.tolist() == [5.0] * 3


def test_a_parameter_no_microbatch_used_is_not_moved_by_weight_decay() -> None:
    used, unused = params(2, 2)
    buckets = GradientBuckets([used, unused])
    optimizer = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    buckets.buffers[0].fill_(7.0)  # of the step before
    buckets.begin()
    buckets.add(used, torch.ones(2))
    buckets.seal(0)
    assert buckets.buckets[0].gradients.tolist() == [0.0, 0.0, 1.0, 1.0]
    buckets.drop_unused()
    optimizer.step()
    assert unused.tolist() == [1.0, 1.0]
    assert used.tolist() != [1.0, 1.0]


def test_a_parameter_another_worker_used_keeps_its_gradient() -> None:
    mine, theirs = params(2, 2), params(2, 2)
    workers = [GradientBuckets(mine), GradientBuckets(theirs)]
    workers[0].add(mine[0], torch.ones(2))
    workers[1].add(theirs[0], torch.ones(2))
    workers[1].add(theirs[1], torch.ones(2))
    for buckets in workers:
        buckets.seal(0)
    total = workers[0].buffers[0] + workers[1].buffers[0]
    for buckets in workers:
        buckets.buffers[0].copy_(total)
        buckets.drop_unused()
    assert all(param.grad is not None for param in (*mine, *theirs))
