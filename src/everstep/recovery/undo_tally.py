"""Notes what the numbers were like that an undo took back: how much was cancelled, and NaN.

Knows no optimizer and no batch. What is noted stays on the device; it is read once, at the end, or
one batch late, so that a device is never idle while somebody waits for its answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]
"""What torch's foreach functions take."""

CANCELLATION_LIMIT = 1e3
"""Above this ratio of added to remaining, three of seven fp32 digits of a running sum are gone."""

_LARGE_ELEMENTS = 1 << 20
"""To copy so many takes a device longer than to launch something for them alone."""


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
    """The look at the last batch, until the next one is launched."""

    def note_cancellation(self, added: Tensors, remaining: Tensors, *, scale: float) -> None:
        """Looks at `scale * added / remaining` of a running sum; `added` is overwritten."""
        torch._foreach_div_(added, remaining)
        largest = torch.stack(list(torch._foreach_max(added))).amax()
        self.settle()
        self.pending = Look(ratios=added, largest=largest, remaining=remaining, scale=scale)
        if largest.is_cpu:  # nothing to wait for, and memory that is free again is still cached
            self.settle()

    def settle(self) -> None:
        """Reads what the last look has found, and counts only if it has found something."""
        if self.pending is None:
            return
        look, self.pending = self.pending, None
        largest = look.scale * look.largest.item()
        if not largest <= CANCELLATION_LIMIT:
            ratios = _joined(look.ratios)
            if math.isnan(largest):
                self.note_finite(look.remaining)
                # Zero over zero is an element that never had a gradient: nothing was cancelled.
                cleaned = [ratio.nan_to_num_(0.0, posinf=math.inf).amax() for ratio in ratios]
                largest = look.scale * torch.stack(cleaned).amax().item()
            if largest > CANCELLATION_LIMIT:
                limit = CANCELLATION_LIMIT / look.scale
                self.num_cancelled += sum(int((ratio > limit).sum()) for ratio in ratios)
        self.largest_cancellation = max(self.largest_cancellation, largest)

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


def _joined(tensors: Tensors) -> Tensors:
    """One tensor instead of many small ones, to be looked at by few launches; large ones stay."""
    if max(tensor.numel() for tensor in tensors) >= _LARGE_ELEMENTS:
        return tensors
    return [torch.cat([tensor.reshape(-1) for tensor in tensors])]
