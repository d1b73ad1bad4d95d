"""Emulated devices: layers whose F, B and W take a given time without using the processor.

    x ------> [B seconds in backward] --+
                                        +--> (+) --> output
    weight -> [W seconds in backward] --+

The addition is where the weight joins (see execute/backward.py): B pays the upper branch, W the
lower one, a fused backward both. So two cores can measure schedules of many workers honestly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Sleep = Callable[[float], None]


def sleep_for(seconds: float) -> None:
    """Sleeps to a deadline: never less, and at most about a tenth of a millisecond more."""
    deadline_s = time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)


class _SleepInBackward(torch.autograd.Function):
    """The identity, whose gradient takes its time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float, sleep: Sleep) -> Tensor:
        ctx.seconds, ctx.sleep = seconds, sleep
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.sleep(ctx.seconds)
        return gradients[0], None, None


class EmulatedLayer(nn.Module):
    """Adds a weight to its input, slowly. Stands for a whole stage of a larger model.

    Where the input needs no gradient, as in the first stage, only the first of a real stage's
    layers would save its B; so the time of B is paid in W.
    """

    def __init__(
        self,
        forward_s: float,
        input_gradient_s: float,
        weight_gradient_s: float,
        size: int = 8,
        *,
        sleep: Sleep = sleep_for,
    ) -> None:
        super().__init__()
        self.forward_s = forward_s
        self.input_gradient_s = input_gradient_s
        self.weight_gradient_s = weight_gradient_s
        self.weight = nn.Parameter(torch.randn(size) / 10)
        self._sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        self._sleep(self.forward_s)
        weight_s = self.weight_gradient_s + (0.0 if x.requires_grad else self.input_gradient_s)
        slow_x: Tensor = _SleepInBackward.apply(x, self.input_gradient_s, self._sleep)  # type: ignore[no-untyped-call]
        slow_weight: Tensor = _SleepInBackward.apply(self.weight, weight_s, self._sleep)  # type: ignore[no-untyped-call]
        return slow_x + slow_weight

    def extra_repr(self) -> str:
        return f"F {self.forward_s} s, B {self.input_gradient_s} s, W {self.weight_gradient_s} s"


def emulated_model(
    num_stages: int,
    forward_s: float,
    input_gradient_s: float,
    weight_gradient_s: float,
    *,
    size: int = 8,
    sleep: Sleep = sleep_for,
) -> nn.Sequential:
    """One emulated layer per stage."""
    return nn.Sequential(
        *(
            EmulatedLayer(forward_s, input_gradient_s, weight_gradient_s, size, sleep=sleep)
            for _ in range(num_stages)
        )
    )
