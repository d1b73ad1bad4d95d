"""Cuts an optimizer's tensors into batches that one undo rule can work through.

Knows nothing of any optimizer's formula. A batch shares its hyper-parameters, device, dtype and
scalars (step counter and the like), and is small: what a rule allocates while it works is bounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one batch's running sums lost, still being worked out by the device."""

    ratios: Tensors
    """What the step added over what remained without it."""
    largest: Tensor
    """The largest of the ratios; NaN if any of them is."""
    remaining: Tensors
    scale: float


@dataclass(slots=True)
class Tally:
    """What the rules noticed about the numbers they took back."""

    largest_cancellation: float = 0.0
    num_cancelled: int = 0
    extremes: list[Tensor] = field(default_factory=list)
    """Numbers that are not finite if any element that was looked at was not."""
    pending: Look | None = None

    def note_cancellation(self, added: Tensors, remaining: Tensors, *, scale: float) -> None:
        """Looks at `scale * added / remaining` of a running sum; `added` is overwritten."""
        torch._foreach_div_(added, remaining)
        largest = torch.stack(list(torch._foreach_max(added))).amax()
        # The answer is read one batch late, so that a device is never idle while it is waited for.
        self.settle()
        self.pending = Look(ratios=added, largest=largest, remaining=remaining, scale=scale)

    def settle(self) -> None:
        """Reads what the last look has found; waits for the device."""
        if self.pending is None:
            return
        look, self.pending = self.pending, None
        largest = look.largest.item()
        if not look.scale * largest <= CANCELLATION_LIMIT:
            ratios = torch.cat([ratio.reshape(-1) for ratio in look.ratios])
            if math.isnan(largest):
                self.note_finite(look.remaining)
                # Zero over zero is an element that never had a gradient: nothing was cancelled.
                largest = ratios.nan_to_num_(0.0, posinf=math.inf).amax().item()
            self.num_cancelled += int((look.scale * ratios > CANCELLATION_LIMIT).sum())
        self.largest_cancellation = max(self.largest_cancellation, look.scale * largest)

    def note_finite(self, tensors: Tensors) -> None:
        """Looks for NaN and infinity; `is_finite` gives the answer, without a wait for each."""
        if tensors[0].device.type == "cpu":
            # Half precision would overflow in a sum of numbers that are all finite.
            dtype = torch.promote_types(tensors[0].dtype, torch.float32)
            self.extremes += [tensor.sum(dtype=dtype) for tensor in tensors]
        else:  # a few launches for all, where the processor is faster one by one
            self.extremes.append(torch.stack(torch._foreach_norm(tensors, math.inf)).amax())

    @property
    def is_finite(self) -> bool:
        """False when a gradient was not, or its square: then the step destroyed what it reached."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for extreme in self.extremes:
            by_kind[extreme.device, extreme.dtype].append(extreme)
        # One transfer for all of a device: a GPU would be waited for many times otherwise.
        return all(
            math.isfinite(torch.stack(same).abs_().amax().item()) for same in by_kind.values()
        )


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
    packs: list[list[Row]] = []
    room = 0
    for param, state in members:
        row = (param, param.grad, *[state[name] for name in key.tensors])
        if key.dtype.is_complex:
            row = tuple(torch.view_as_real(tensor) for tensor in row)
        for piece in [row] if whole else _pieces(row, limit):
            num_elements = piece[0].numel()
            if num_elements == 0:
                continue
            if num_elements > room:
                packs.append([])
                room = limit
            packs[-1].append(piece)
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
