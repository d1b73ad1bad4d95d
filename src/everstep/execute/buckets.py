"""Gradients in flat buffers, so that reducing them over a stage's workers needs no copies.

    buffer of a bucket   | grad of p3 | grad of p2 | grad of p1 | used p3 p2 p1 |
                           ^ p3.grad is a view of this           ^ one number each

Parameters are laid out last first, the order in which a backward pass finishes them. The tail says
which parameters got a gradient at all; it is summed along with the gradients, so after the
reduction every worker knows the parameters that no micro-batch used. Plain PyTorch leaves those
with `grad is None` and its optimizers do not touch them (no weight decay, no momentum); so do we.

A step's first gradient of a parameter is copied to its place and later ones are added, so nothing
is filled with zeros first. Does not know groups or optimizers. The life of a step:
begin() - accumulated() or add() - seal() a bucket, reduce it - drop_unused() - optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Some parameters of one dtype and device, and the buffer their gradients live in."""

    params: tuple[Parameter, ...]
    buffer: Tensor
    """Gradients and tail: what is to be summed over the workers."""

    gradients: Tensor
    """The buffer without its tail: what a gradient norm is taken of."""

    views: tuple[Tensor, ...]

    @property
    def used(self) -> Tensor:
        return self.buffer[self.gradients.numel() :]


class GradientBuckets:
    """Owns the gradients of `params`: each `param.grad` is a view into one of `buffers`."""

    def __init__(self, params: Iterable[Parameter], *, bucket_bytes: int = 25 << 20) -> None:
        trainable = [param for param in params if param.requires_grad]
        self.buckets = tuple(
            _allocate(group) for group in _group(trainable[::-1], bucket_bytes=bucket_bytes)
        )
        self._bucket_of = {
            param: number for number, bucket in enumerate(self.buckets) for param in bucket.params
        }
        self._views = {
            param: view
            for bucket in self.buckets
            for param, view in zip(bucket.params, bucket.views, strict=True)
        }
        self._used: set[Parameter] = set()
        self.reattach()

    @property
    def buffers(self) -> list[Tensor]:
        return [bucket.buffer for bucket in self.buckets]

    @property
    def params(self) -> Sequence[Parameter]:
        """The trainable parameters, in the order of the buckets."""
        return list(self._bucket_of)

    def bucket_of(self, param: Parameter) -> int:
        """The number of the bucket, an index into `buckets` and `buffers`."""
        return self._bucket_of[param]

    def reattach(self) -> None:
        """Makes each `param.grad` its view again, whatever was put there meanwhile."""
        for param, view in self._views.items():
            if param.grad is not view:
                param.grad = view

    def begin(self) -> None:
        """Starts a step: no parameter is used yet, none has a gradient."""
        self._used.clear()
        for param in self._views:
            param.grad = None

    def accumulated(self, param: Parameter) -> None:
        """Autograd has left a first gradient in `param.grad`, or added to the one there."""
        gradient = param.grad
        assert gradient is not None
        # Sparse ones are added out of place.
        if gradient is not self._views[param]:
            self._put(param, gradient)

    def add(self, param: Parameter, gradient: Tensor) -> None:
        if param in self._used:
            self._views[param].add_(gradient)
        else:
            self._put(param, gradient)

    def _put(self, param: Parameter, gradient: Tensor) -> None:
        view = self._views[param]
        view.copy_(gradient.to_dense())
        param.grad = view
        self._used.add(param)

    def seal(self, number: int) -> None:
        """Completes one bucket, with zeros for parameters that were not used. To be called before
        the bucket is reduced."""
        bucket = self.buckets[number]
        for param, view in zip(bucket.params, bucket.views, strict=True):
            if param not in self._used:
                view.zero_()
                param.grad = view
        if self._used.issuperset(bucket.params):
            bucket.used.fill_(1.0)  # A copy from the host would wait for the device.
        else:
            flags = [float(param in self._used) for param in bucket.params]
            bucket.used.copy_(torch.tensor(flags))

    def drop_unused(self) -> None:
        """Gives parameters that no micro-batch of any worker used `grad = None`, until `begin`."""
        for bucket in self.buckets:
            # Reading the tail waits for the device: only where something may be unused.
            if self._used.issuperset(bucket.params):
                continue
            for param, count in zip(bucket.params, bucket.used.tolist(), strict=True):
                if count == 0:
                    param.grad = None


def _group(params: Iterable[Parameter], *, bucket_bytes: int) -> list[list[Parameter]]:
    """Fills buckets in order up to `bucket_bytes`; one dtype and device per bucket."""
    groups: list[list[Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Parameter], int]] = {}
    for param in params:
        kind = (param.dtype, param.device)
        group, num_bytes = filling.get(kind, ([], 0))
        if not group or num_bytes + param.nbytes > bucket_bytes:
            group, num_bytes = [], 0
            groups.append(group)
        group.append(param)
        filling[kind] = (group, num_bytes + param.nbytes)
    return groups


def _allocate(params: Sequence[Parameter]) -> Bucket:
    num_elements = sum(param.numel() for param in params)
    buffer = torch.zeros(num_elements + len(params), dtype=params[0].dtype, device=params[0].device)
    gradients = buffer[:num_elements]
    sizes = [param.numel() for param in params]
    views = tuple(
        piece.view(param.shape)
        for piece, param in zip(torch.split(gradients, sizes), params, strict=True)
    )
    return Bucket(params=tuple(params), buffer=buffer, gradients=gradients, views=views)
