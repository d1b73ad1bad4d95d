"""Fits a loss curve to points: a power law or an exponential, each falling to a floor.

    power law      L = floor + drop * (1 + x / offset) ** -rate
    exponential    L = floor + drop * exp(-rate * x)              x = (step - first) / span

Both fall from `floor + drop` at x = 0. For given `rate` and `offset` the other two are a linear
fit, so a grid of shapes is tried at once, and only the winner is polished. The family is the one
that tells the last fifth of the points best from those before. Everything is done in units of the
points' own range: steps counted in other units, or a loss in other units, give the same curve.
Knows nothing of time; pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

LEAST_POINTS = 16
HELD_OUT_FRACTION = 0.2
MUST_BEAT_CONSTANT_BY = 0.8
"""A curve must tell the held-out points with less than this share of a constant's error."""

_HUBER = 1.5
"""Residuals above so many standard deviations count linearly: a spike must not bend the curve."""
_REWEIGHTINGS = 3
_NEVER = np.inf


class Family(StrEnum):
    POWER_LAW = "power law"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A falling loss curve. Before its first step it is flat: what was there is another's."""

    family: Family
    first_step: float
    span_steps: float
    floor: float
    drop: float
    rate: float
    offset: float
    gained_before: float = 0.0
    """What the loss had fallen before this curve began: it is restarted when training changes."""

    def losses(self, steps: Floats) -> Floats:
        x = np.maximum(steps - self.first_step, 0.0) / self.span_steps
        return self.floor + self.drop * _shape(self.family, x, self.rate, self.offset)

    def loss(self, step: float) -> float:
        return float(self.losses(np.asarray(step, dtype=np.float64)))

    def slope(self, step: float) -> float:
        """Change of the loss per step; negative, and zero before the first step."""
        x = (step - self.first_step) / self.span_steps
        if x < 0:
            return 0.0
        scale = -self.rate * self.drop / self.span_steps
        if self.family is Family.EXPONENTIAL:
            return scale * float(np.exp(-self.rate * x))
        return scale / self.offset * float((1 + x / self.offset) ** (-self.rate - 1))

    def gained(self, until_step: float) -> float:
        """How far the loss has fallen by then since training began."""
        return self.gained_before + self.floor + self.drop - self.loss(until_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """What is fitted: scaled to the range 0 to 1 both ways, oldest first."""

    x: Floats
    y: Floats
    weight: Floats

    @property
    def noise(self) -> float:
        """Standard deviation of a point around its neighbours, whatever the trend."""
        jumps = np.abs(np.diff(self.y))
        return max(float(np.median(jumps)) * 1.4826 / math.sqrt(2.0), 1e-9)

    def part(self, which: slice) -> Points:
        return Points(x=self.x[which], y=self.y[which], weight=self.weight[which])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    family: Family
    rate: float
    offset: float
    floor: float
    drop: float

    def at(self, x: Floats) -> Floats:
        return self.floor + self.drop * _shape(self.family, x, self.rate, self.offset)


def fit_curve(steps: Floats, losses: Floats, counts: Floats) -> Curve | None:
    """The curve through points that stand for `counts` steps each; None if none beats a constant.

    `steps` must rise.
    """
    if len(losses) < LEAST_POINTS:
        return None
    calm = _median_of_three(losses)
    low, spread = float(calm.min()), float(np.ptp(calm))
    if spread <= 0:
        return None
    first, span = float(steps[0]), float(steps[-1] - steps[0])
    # The square root of the number of steps: more is more certain, but a model is not exact, and
    # the many steps at the end must not drown the few at the beginning.
    points = Points(x=(steps - first) / span, y=(losses - low) / spread, weight=np.sqrt(counts))
    family = _best_family(points)
    if family is None:
        return None
    found = _fit_grid(points, family)
    if found is None:
        return None
    fit = _polish(points, found)
    return Curve(
        family=family,
        first_step=first,
        span_steps=span,
        floor=low + spread * fit.floor,
        drop=spread * fit.drop,
        rate=fit.rate,
        offset=fit.offset,
    )


def _median_of_three(losses: Floats) -> Floats:
    """Without lone spikes, which would else set the scale."""
    before, after = np.roll(losses, 1), np.roll(losses, -1)
    before[0], after[-1] = losses[0], losses[-1]
    return np.asarray(np.median((before, losses, after), axis=0))


def _best_family(points: Points) -> Family | None:
    """By the error on the last points, told from those before; None if a constant is as good."""
    num_told = max(4, round(HELD_OUT_FRACTION * len(points.x)))
    known, told = points.part(slice(None, -num_told)), points.part(slice(-num_told, None))
    constant = float(np.median(known.y))
    best, least = None, MUST_BEAT_CONSTANT_BY * float(np.median(np.abs(told.y - constant)))
    for family in Family:
        fit = _fit_grid(known, family)
        if fit is None:
            continue
        error = float(np.median(np.abs(told.y - fit.at(told.x))))
        if error < least:
            best, least = family, error
    return best


def _shape(family: Family, x: Floats, rate: Floats | float, offset: Floats | float) -> Floats:
    if family is Family.EXPONENTIAL:
        return np.asarray(np.exp(-rate * x), dtype=np.float64)
    return np.asarray((1.0 + x / offset) ** -rate, dtype=np.float64)


@cache
def _grid(family: Family) -> tuple[Floats, Floats]:
    """Rates and offsets to try: over within a thousandth of the range, up to hardly bent.

    Anything straighter would promise, from points that show no bend, that the loss falls for ever.
    """
    if family is Family.EXPONENTIAL:
        rates = np.geomspace(1.0, 3000.0, 40)
        return rates, np.ones_like(rates)
    offsets, rates = np.meshgrid(np.geomspace(3e-4, 0.3, 14), np.geomspace(0.1, 3.0, 8))
    return rates.ravel(), offsets.ravel()


def _fit_grid(points: Points, family: Family) -> _Fit | None:
    """The best falling shape of the grid, each with its own floor and drop, by weighted Huber."""
    rates, offsets = _grid(family)
    shapes = _shape(family, points.x[None, :], rates[:, None], offsets[:, None])
    bend = _HUBER * points.noise
    weight = np.broadcast_to(points.weight, shapes.shape)
    floor, drop = _linear(shapes, points.y, weight)
    for _ in range(_REWEIGHTINGS):
        miss = np.abs(points.y - floor[:, None] - drop[:, None] * shapes)
        floor, drop = _linear(shapes, points.y, weight * np.minimum(1.0, bend / (miss + 1e-12)))
    miss = np.abs(points.y - floor[:, None] - drop[:, None] * shapes)
    price = np.where(miss <= bend, miss * miss / 2, bend * (miss - bend / 2)) @ points.weight
    price[~(drop > 0)] = _NEVER
    best = int(np.argmin(price))
    if not np.isfinite(price[best]):
        return None
    return _Fit(
        family=family,
        rate=float(rates[best]),
        offset=float(offsets[best]),
        floor=float(floor[best]),
        drop=float(drop[best]),
    )


def _linear(shapes: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Floor and drop of each row of shapes by weighted least squares; flat rows get no drop."""
    total = weight.sum(axis=1)
    mean_shape = (weight * shapes).sum(axis=1) / total
    mean_y = (weight * y).sum(axis=1) / total
    around = weight * (shapes - mean_shape[:, None])
    spread = (around * shapes).sum(axis=1)
    is_flat = spread <= 1e-12 * total
    drop = np.where(is_flat, 0.0, (around * y).sum(axis=1) / np.where(is_flat, 1.0, spread))
    return mean_y - drop * mean_shape, drop


def _polish(points: Points, start: _Fit) -> _Fit:
    """Moves the grid's winner to the nearest best fit; keeps it when that does not stay falling."""
    from scipy.optimize import least_squares

    root = np.sqrt(points.weight)
    has_offset = start.family is Family.POWER_LAW

    def fit_of(values: Floats) -> _Fit:
        return _Fit(
            family=start.family,
            floor=float(values[0]),
            drop=float(values[1]),
            rate=float(np.exp(values[2])),
            offset=float(np.exp(values[3])) if has_offset else 1.0,
        )

    def misses(values: Floats) -> Floats:
        return root * (points.y - fit_of(values).at(points.x))

    at = [start.floor, start.drop, np.log(start.rate)] + [np.log(start.offset)] * has_offset
    # Half a grid cell or so: further away another cell would have won.
    room = np.array([0.5, 0.5, 0.25] + [0.5] * has_offset)
    found = least_squares(
        misses,
        np.array(at),
        bounds=(at - room, at + room),
        loss="soft_l1",
        f_scale=_HUBER * points.noise * float(np.median(root)),
        max_nfev=25,
    )
    fit = fit_of(found.x)
    return fit if fit.drop > 0 else start
