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
from dataclasses import dataclass, replace
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

_MOST_MOVES = 50
_DAMPING, _EASED = 1e-3, 8.0
_SETTLED = 1e-9
"""A move that lowers the price by a smaller share is the last."""


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

    @property
    def values(self) -> Floats:
        """What is polished."""
        return np.array([self.floor, self.drop, math.log(self.rate), math.log(self.offset)])

    def moved_to(self, values: Floats) -> _Fit:
        floor, drop, rate, offset = map(float, values)
        return replace(self, floor=floor, drop=drop, rate=math.exp(rate), offset=math.exp(offset))


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
    """Moves the grid's winner to the nearest best fit; keeps it when that does not stay falling.

    By the steps of Levenberg and Marquardt, along the walls of a box around the start.
    """
    # Half a grid cell or so: further away another cell would have won.
    room = np.array([0.5, 0.5, 0.25, 0.5 if start.family is Family.POWER_LAW else 0.0])
    low, high = start.values - room, start.values + room
    bend = _HUBER * points.noise * float(np.median(np.sqrt(points.weight)))
    fit, price, damping = start, _price(points, start, bend), _DAMPING
    for _ in range(_MOST_MOVES):
        normal, pull = _normal_equations(points, fit, bend)
        values = fit.values
        is_free = np.where(pull > 0, values < high, values > low)
        normal[np.diag_indices_from(normal)] *= 1 + damping
        # Whatever is at a wall and pulled against it stays there.
        normal[~is_free], pull[~is_free] = np.eye(len(values))[~is_free], 0.0
        move = np.linalg.lstsq(normal, pull, rcond=None)[0]
        tried = start.moved_to(np.clip(values + move, low, high))
        tried_price = _price(points, tried, bend)
        if tried_price < price:
            is_settled = price - tried_price < _SETTLED * price
            fit, price, damping = tried, tried_price, damping / _EASED
            if is_settled:
                break
        else:
            damping *= _EASED
    return fit if fit.drop > 0 else start


def _price(points: Points, fit: _Fit, bend: float) -> float:
    """Squares of the misses, beyond `bend` their sizes: a smooth Huber."""
    ratio = (points.y - fit.at(points.x)) / bend
    return float((np.sqrt(1.0 + points.weight * ratio * ratio) - 1.0).sum())


def _normal_equations(points: Points, fit: _Fit, bend: float) -> tuple[Floats, Floats]:
    """Of the linear fit that the next values come from; far misses weigh less."""
    shape = _shape(fit.family, points.x, fit.rate, fit.offset)
    by_rate, by_offset = _log_slopes(fit, points.x)
    fallen = fit.drop * shape
    slopes = np.stack((np.ones_like(shape), shape, fallen * by_rate, fallen * by_offset))
    miss = points.y - fit.floor - fallen
    weighted = slopes * points.weight / np.sqrt(1.0 + points.weight * (miss / bend) ** 2)
    return weighted @ slopes.T, weighted @ miss


def _log_slopes(fit: _Fit, x: Floats) -> tuple[Floats, Floats]:
    """How the logarithm of the shape changes with those of the rate and of the offset."""
    if fit.family is Family.EXPONENTIAL:
        return -fit.rate * x, np.zeros_like(x)
    ratio = x / fit.offset
    return -fit.rate * np.log1p(ratio), fit.rate * ratio / (1.0 + ratio)
