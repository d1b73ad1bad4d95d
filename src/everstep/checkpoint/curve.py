"""The loss so far, thinned, and the curve through it, kept up to date as training goes on.

Points are medians over more and more steps: each stands for 1/64 of all steps before it, so a
million steps are some 700 points, the steep beginning is kept in full, and spikes do no harm. The
curve is fitted again when the history has grown by a quarter, so the cost per step falls as 1/n.

When the loss leaves the curve (a learning-rate drop, a divergence, other data), and no curve fits
both what was before and what came since, what was before is forgotten and a new curve is begun.
The sign is Page's cumulative sum: misses to one side are added up, small ones forgiven.
Pure; the same losses give the same curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from everstep.checkpoint.curve_fit import LEAST_POINTS, Curve, Floats, fit_curve
from everstep.core.errors import ConfigError

__all__ = ["Curve", "LossHistory"]

_POINTS_PER_HISTORY = 64
_POINTS_PER_JOB = 256
"""So that after a restart late in a job, points are not single steps, which are mostly noise."""
_REFIT_GROWTH = 1.25
_FORGIVEN = 1.0
"""Standard deviations of a miss that are no sign of a change."""
_MOST_OF_ONE = 6.0
"""No single point counts for more: a spike is no change."""
_ALARM = 20.0
_CALM = 5.0
"""Below it no change is under way, so the curve may be fitted to what came last."""


@dataclass(frozen=True, slots=True)
class _Point:
    step: float
    loss: float
    num_steps: int


class LossHistory:
    """`add` every step's loss, then ask for the `curve`: None as long as none fits."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._open: list[tuple[float, float]] = []
        self._num_steps = 0
        self._num_steps_ever = 0
        self._next_fit = LEAST_POINTS
        self._curve: Curve | None = None
        self._noise = 1.0
        self._drift = _Drift()
        self._start_loss: float | None = None
        self._gained_before = 0.0

    def curve(self) -> Curve | None:
        return self._curve

    def to_json(self) -> dict[str, object]:
        """To be kept with a checkpoint, so that a resumed job still knows its beginning."""
        return {
            "points": [[point.step, point.loss, point.num_steps] for point in self._points],
            "steps_ever": self._num_steps_ever - len(self._open),
            "start_loss": self._start_loss,
            "gained_before": self._gained_before,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> LossHistory:
        history = LossHistory()
        try:
            history._points = [
                _Point(float(step), float(loss), int(number))
                for step, loss, number in document["points"]
            ]
            history._num_steps_ever = int(document["steps_ever"])
            start = document["start_loss"]
            history._start_loss = None if start is None else float(start)
            history._gained_before = float(document["gained_before"])
        except (KeyError, TypeError, ValueError) as error:
            rule = f"must be what LossHistory.to_json gave ({type(error).__name__}: {error})"
            raise ConfigError("loss history", "of another form", rule) from None
        history._num_steps = sum(point.num_steps for point in history._points)
        history._take(_through(history._points))
        return history

    def add(self, step: float, loss: float) -> None:
        """Steps must rise; one that does not was run again, and what came after it is taken out."""
        if (self._open and step <= self._open[-1][0]) or self._points_reach(step):
            self._rewind(step)
        if not math.isfinite(loss):
            self._restart(len(self._points))
            return
        self._open.append((step, loss))
        self._num_steps += 1
        self._num_steps_ever += 1
        if len(self._open) >= self._width:
            self._close_point()

    @property
    def _width(self) -> int:
        """How many steps the next point stands for."""
        return max(
            1, self._num_steps // _POINTS_PER_HISTORY, self._num_steps_ever // _POINTS_PER_JOB
        )

    def _points_reach(self, step: float) -> bool:
        return bool(self._points) and step <= self._points[-1].step

    def _rewind(self, step: float) -> None:
        # After a rollback the same steps come again; the curve fitted to them still holds.
        kept = [seen for seen in self._open if seen[0] < step]
        dropped = len(self._open) - len(kept)
        while self._points_reach(step):
            dropped += self._points.pop().num_steps
        self._open = kept
        self._num_steps -= dropped
        self._num_steps_ever -= dropped
        self._drift = _Drift()

    def _close_point(self) -> None:
        steps, losses = zip(*self._open, strict=True)
        point = _Point(float(np.mean(steps)), float(np.median(losses)), len(losses))
        self._open = []
        self._points.append(point)
        if self._start_loss is None:
            self._start_loss = point.loss
        if self._curve is not None:
            self._drift = self._drift.after(self._curve_miss(point), len(self._points) - 1)
        if self._drift.size > _ALARM:
            self._reconsider(self._drift.begin)
        elif self._num_steps >= self._next_fit and self._drift.size < _CALM:
            self._fit()

    def _curve_miss(self, point: _Point) -> float:
        assert self._curve is not None
        miss = (point.loss - self._curve.loss(point.step)) / self._noise
        return min(max(miss, -_MOST_OF_ONE), _MOST_OF_ONE)

    def _reconsider(self, begin: int) -> None:
        """The points from `begin` on are off the curve: fits all again, or begins anew there."""
        self._take(_through(self._points))
        if self._curve is None or not self._holds_from(begin):
            self._restart(begin)

    def _holds_from(self, begin: int) -> bool:
        drift = _Drift()
        for point in self._points[begin:]:
            drift = drift.after(self._curve_miss(point), begin)
            if drift.size > _ALARM:
                return False
        return True

    def _restart(self, begin: int) -> None:
        """Goes on with the points from `begin` only, as if training had started there."""
        before, self._points = self._points[:begin], self._points[begin:]
        if before and self._start_loss is not None:
            level = float(np.median([point.loss for point in before[-3:]]))
            self._gained_before = max(0.0, self._start_loss - level)
        self._num_steps = sum(point.num_steps for point in self._points) + len(self._open)
        self._next_fit = self._num_steps
        self._curve = None
        self._drift = _Drift()

    def _fit(self) -> None:
        curve = _through(self._points)
        if curve is None and len(self._points) >= 4 * LEAST_POINTS:
            # Nothing fits all of it, and perhaps something fits what came last.
            self._restart(len(self._points) // 2)
            curve = _through(self._points)
        self._take(curve)

    def _take(self, curve: Curve | None) -> None:
        self._next_fit = max(LEAST_POINTS, math.ceil(self._num_steps * _REFIT_GROWTH))
        self._drift = _Drift()
        self._curve = None
        if curve is not None:
            self._curve = replace(curve, gained_before=self._gained_before)
            self._noise = _noise(self._points, curve)


@dataclass(frozen=True, slots=True)
class _Drift:
    """The misses to either side added up, and since which point they have not been back at zero."""

    above: float = 0.0
    below: float = 0.0
    above_begin: int = 0
    below_begin: int = 0

    @property
    def size(self) -> float:
        return max(self.above, self.below)

    @property
    def begin(self) -> int:
        return self.above_begin if self.above >= self.below else self.below_begin

    def after(self, miss: float, index: int) -> _Drift:
        return _Drift(
            max(0.0, self.above + miss - _FORGIVEN),
            max(0.0, self.below - miss - _FORGIVEN),
            self.above_begin if self.above > 0 else index,
            self.below_begin if self.below > 0 else index,
        )


def _through(points: Sequence[_Point]) -> Curve | None:
    steps, losses, counts = (
        np.array([getattr(point, name) for point in points], dtype=np.float64)
        for name in ("step", "loss", "num_steps")
    )
    return fit_curve(steps, losses, counts)


def _noise(points: Sequence[_Point], curve: Curve) -> float:
    """How far a point usually is from the curve, seen over the later half; never quite nothing."""
    late = points[len(points) // 2 :]
    steps: Floats = np.array([point.step for point in late])
    misses = np.abs(np.array([point.loss for point in late]) - curve.losses(steps))
    return max(1.4826 * float(np.median(misses)), 1e-3 * curve.drop)
