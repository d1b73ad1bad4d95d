"""Cuts an optimizer's tensors into batches that one undo rule can work through.

Knows nothing of any optimizer's formula. A batch shares its hyper-parameters, device, dtype and
scalars (step counter and the like), and is small: what a rule allocates while it works is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from everstep.recovery.undo_tally import Tally

Hyper: TypeAlias = Mapping[str, Any]
"""The entries of a param group without its parameters, tensors turned into numbers."""

# A batch of this size stays in the processor's cache over the dozen passes of a rule; an
# accelerator wants large launches instead.
_CPU_BATCH_ELEMENTS = 1 << 18
_DEVICE_BATCH_ELEMENTS = 1 << 25


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


class BucketKey(NamedTuple):
    """What the parameters of one bucket have in common, within a param group."""

    device: torch.device
    dtype: torch.dtype
    scalars: tuple[float, ...]
    """In the order in which the rule names them."""
    tensors: tuple[str, ...]
    is_new: bool
    """The record says that there was no state before the step."""


State: TypeAlias = dict[str, Any]
Member: TypeAlias = tuple[Tensor, State]
"""A parameter and its optimizer state."""

Row: TypeAlias = tuple[Tensor, ...]
"""A (piece of a) parameter, its gradient and the tensors of its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """All parameters that may share a batch, and how they are cut into batches."""

    group: int
    key: BucketKey
    hyper: Hyper
    scalars: Mapping[str, float]
    members: list[Member]
    packs: list[list[Row]]
    """The rows of each batch."""

    @property
    def is_first(self) -> bool:
        return self.key.is_new or self.scalars.get("step") == 1

    def batches(self, *, has_params: bool, tally: Tally) -> Iterator[Batch]:
        for pack in self.packs:
            params, grads, *columns = (list(column) for column in zip(*pack, strict=True))
            yield Batch(
                hyper=self.hyper,
                scalars=self.scalars,
                is_first=self.is_first,
                has_params=has_params,
                params=params,
                grads=list(torch._foreach_neg(grads)) if self.hyper.get("maximize") else grads,
                state=dict(zip(self.key.tensors, columns, strict=True)),
                tally=tally,
            )


def pack_rows(key: BucketKey, members: list[Member], *, whole: bool) -> list[list[Row]]:
    """Cuts the tensors of a bucket into batches; `whole` forbids to cut a tensor into pieces."""
    limit = _CPU_BATCH_ELEMENTS if key.device.type == "cpu" else _DEVICE_BATCH_ELEMENTS
    columns: list[list[Any]] = [[param for param, _ in members], [p.grad for p, _ in members]]
    columns += [[state[name] for _, state in members] for name in key.tensors]
    if key.dtype.is_complex:
        columns = [[torch.view_as_real(tensor) for tensor in column] for column in columns]
    rows: Iterable[Row] = zip(*columns, strict=True)
    if not whole:
        rows = chain.from_iterable(_pieces(row, limit) for row in rows)
    packs: list[list[Row]] = []
    room = 0
    for row in rows:
        num_elements = row[0].numel()
        if num_elements == 0:
            continue
        if num_elements > room:
            packs.append([])
            room = limit
        packs[-1].append(row)
        room -= num_elements
    return packs


def _pieces(row: Row, limit: int) -> Iterable[Row]:
    if row[0].numel() <= limit or not all(tensor.is_contiguous() for tensor in row):
        return [row]
    return zip(*(torch.split(tensor.view(-1), limit) for tensor in row), strict=True)


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a param group with tensors (lr, betas) turned into numbers."""
    return {name: _number(value) for name, value in group.items() if name != "params"}


def scalar_values(states: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Reads one scalar of many states, with one transfer where they live on one device."""
    values = [state[name] for state in states]
    kinds = {_kind_on_device(value) for value in values}
    if len(kinds) != 1 or None in kinds:
        return [float(value) for value in values]
    read: list[float] = torch.stack(values).reshape(-1).tolist()
    return read


def _kind_on_device(value: Any) -> tuple[Any, ...] | None:
    """None for what can be read without waiting for a device."""
    if not isinstance(value, Tensor) or value.is_cpu:
        return None
    return value.device, value.dtype, value.shape


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, tuple):
        return tuple(_number(part) for part in value)
    return value
