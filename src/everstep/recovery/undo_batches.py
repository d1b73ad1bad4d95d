"""Cuts an optimizer's tensors into batches that one undo rule can work through.

Knows nothing of any optimizer's formula. A batch shares its hyper-parameters, device, dtype and
scalars (step counter and the like), and is small: what a rule allocates while it works is bounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hyper: TypeAlias = Mapping[str, Any]
"""The entries of a param group without its parameters, tensors turned into numbers."""

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]
"""What torch's foreach functions take."""

CANCELLATION_LIMIT = 1e3
"""Above this ratio of added to remaining, three of seven fp32 digits of a running sum are gone."""

# A batch of this size stays in the processor's cache over the dozen passes of a rule; an
# accelerator wants large launches instead.
_CPU_BATCH_ELEMENTS = 1 << 18
_DEVICE_BATCH_ELEMENTS = 1 << 25


@dataclass(slots=True)
class Tally:
    """What the rules noticed about the numbers they took back."""

    largest_cancellation: float = 0.0
    num_cancelled: int = 0
    extremes: list[Tensor] = field(default_factory=list)
    """One number for each tensor that was looked at: not finite if any element was not."""

    def note_cancellation(self, added: Tensors, remaining: Tensors, *, scale: float) -> None:
        """Looks at `scale * added / remaining` of a running sum; `added` is overwritten."""
        torch._foreach_div_(added, remaining)
        largest = _largest(added)
        if math.isnan(largest):
            self.note_finite(remaining)
            # Zero over zero is an element that has never had a gradient: nothing was cancelled.
            cleaned = [ratio.nan_to_num_(0.0, posinf=math.inf) for ratio in added]
            largest = _largest(cleaned)
        self.largest_cancellation = max(self.largest_cancellation, scale * largest)
        if scale * largest > CANCELLATION_LIMIT:
            limit = CANCELLATION_LIMIT / scale
            self.num_cancelled += sum(int((ratio > limit).sum()) for ratio in added)

    def note_finite(self, tensors: Tensors) -> None:
        """Looks for NaN and infinity; `is_finite` gives the answer, without a wait for each."""
        if tensors[0].device.type == "cpu":
            self.extremes += [tensor.sum() for tensor in tensors]
        else:  # a few launches for all, where the processor is faster one by one
            self.extremes += torch._foreach_norm(tensors, math.inf)

    @property
    def is_finite(self) -> bool:
        """False when a gradient was not, or its square: then the step destroyed what it reached."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for extreme in self.extremes:
            by_kind[extreme.device, extreme.dtype].append(extreme)
        # One transfer for all of a device: a GPU would be waited for a hundred times otherwise.
        return all(bool(torch.stack(same).isfinite().all()) for same in by_kind.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors to take back together: equally long lists, one entry per (piece of a) parameter."""

    hyper: Hyper
    scalars: Mapping[str, float]
    is_first: bool
    """The step created the state, so the state need not be inverted: it will be dropped."""
    has_params: bool
    """The parameters are already back, from copies."""
    params: list[Tensor]
    grads: list[Tensor]
    """As applied, already negated when the optimizer maximizes."""
    state: Mapping[str, list[Tensor]]
    tally: Tally

    @property
    def lr(self) -> float:
        return float(self.hyper["lr"])

    @property
    def step(self) -> int:
        """The number of the step that is taken back; the first is 1."""
        return round(self.scalars["step"])


@dataclass(frozen=True, slots=True)
class BucketKey:
    """What the parameters of one bucket have in common."""

    group: int
    device: torch.device
    dtype: torch.dtype
    scalars: tuple[tuple[str, float], ...]
    tensors: tuple[str, ...]
    is_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """All parameters that may share a batch, before they are cut to size."""

    key: BucketKey
    hyper: Hyper
    params: list[Tensor] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)

    def batches(self, *, whole: bool, has_params: bool, tally: Tally) -> Iterator[Batch]:
        """Yields the bucket in batches; `whole` forbids cutting a tensor into pieces."""
        limit = _CPU_BATCH_ELEMENTS if self.key.device.type == "cpu" else _DEVICE_BATCH_ELEMENTS
        for rows in _packed(self._pieces(limit, whole=whole), limit):
            params, grads, *columns = (list(column) for column in zip(*rows, strict=True))
            yield Batch(
                hyper=self.hyper,
                scalars=dict(self.key.scalars),
                is_first=self.key.is_first,
                has_params=has_params,
                params=params,
                grads=list(torch._foreach_neg(grads)) if self.hyper.get("maximize") else grads,
                state=dict(zip(self.key.tensors, columns, strict=True)),
                tally=tally,
            )

    def _pieces(self, limit: int, *, whole: bool) -> Iterator[tuple[Tensor, ...]]:
        for param, state in zip(self.params, self.states, strict=True):
            assert param.grad is not None
            row = (param, param.grad, *(state[name] for name in self.key.tensors))
            row = tuple(_real(tensor) for tensor in row)
            if whole or row[0].numel() <= limit or not all(t.is_contiguous() for t in row):
                yield row
            else:
                yield from zip(*(tensor.view(-1).split(limit) for tensor in row), strict=True)


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group with tensors (lr, betas) turned into numbers."""
    return {name: _number(value) for name, value in group.items() if name != "params"}


def scalar_values(states: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Reads one scalar of many states with one transfer, wherever the scalars live."""
    values = [state[name] for state in states]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not values or len(tensors) < len(values):
        return [float(value) for value in values]
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    read: list[float] = torch.stack([tensor.reshape(()) for tensor in tensors]).tolist()
    return read


def _packed(rows: Iterator[tuple[Tensor, ...]], limit: int) -> Iterator[list[tuple[Tensor, ...]]]:
    pack: list[tuple[Tensor, ...]] = []
    num_elements = 0
    for row in rows:
        if pack and num_elements + row[0].numel() > limit:
            yield pack
            pack, num_elements = [], 0
        if row[0].numel() > 0:
            pack.append(row)
            num_elements += row[0].numel()
    if pack:
        yield pack


def _largest(tensors: Tensors) -> float:
    return float(torch.stack(list(torch._foreach_max(tensors))).amax().item())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, tuple):
        return tuple(_number(part) for part in value)
    return value
