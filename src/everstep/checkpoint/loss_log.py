"""The losses as they are reported: read without holding up a device, thinned, kept in checkpoints.

A loss on a device is copied to the host behind the step that made it, and read when the next one
comes, when the copy is done. Of a long run every n-th mean is kept, at most `MOST_POINTS` in all,
so that after a resume the curve is there again at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from everstep.checkpoint.curve import LossHistory

MOST_POINTS = 1024


class LossLog:
    def __init__(self, history: LossHistory) -> None:
        self.latest: float | None = None
        self._history = history
        self._points: list[tuple[float, float]] = []
        self._open: list[tuple[int, float]] = []
        self._width = 1
        self._unread: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def report(self, step: int, loss: float | Tensor) -> None:
        self.read()
        if not isinstance(loss, Tensor):
            self._add(step, float(loss))
            return
        if loss.device.type == "cpu":
            self._add(step, loss.detach().item())
            return
        on_host = loss.detach().to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None
        self._unread = (step, on_host, copied)

    def read(self) -> None:
        """Takes in a loss that was left on its way from a device."""
        unread, self._unread = self._unread, None
        if unread is not None:
            step, on_host, copied = unread
            if copied is not None:
                copied.synchronize()
            self._add(step, on_host.item())

    def to_tensor(self) -> Tensor:
        """Rows of step and loss."""
        return torch.tensor(self._points, dtype=torch.float64).reshape(-1, 2)

    def load(self, points: Tensor) -> None:
        self._points = [(step, loss) for step, loss in points.tolist()]
        for step, loss in self._points:
            self._history.add(step, loss)
        if len(self._points) > 1:
            self._width = max(1, round(self._points[-1][0] / len(self._points)))

    def _add(self, step: int, loss: float) -> None:
        self.latest = loss
        self._history.add(step, loss)
        if not math.isfinite(loss):
            return
        self._open.append((step, loss))
        if len(self._open) < self._width:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) >= MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._width *= 2


def _mean(points: list[tuple[int, float]] | tuple[tuple[float, float], ...]) -> tuple[float, float]:
    steps, losses = zip(*points, strict=True)
    return sum(steps) / len(steps), sum(losses) / len(losses)
