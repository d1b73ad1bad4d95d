"""One solver for all objectives: where checkpoints go, given their price and that of lost work.

An objective says, for each stretch of training, the price kappa of a checkpoint at its end, and the
risks: how often work is lost (rate) and what a second of that work is worth (value). To first order
in the rate, taking checkpoints every tau seconds costs per second

    kappa / tau + rate * value * tau / 2        least at    tau = sqrt(2 kappa / (rate * value))

`benefit` is that formula at one moment, for use online. `place` is exact: dynamic programming
over step boundaries. Losing what lies between the last checkpoint a and a failure at s costs
W(s) - W(a), W the value of all work so far, so the price of a segment obeys the quadrangle
inequality: the best start of a segment never moves back as its end moves on, and the price is
convex in the number of checkpoints. So one pass looks only at a short window, and a cap on the
number is met by an extra charge per checkpoint. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everstep.checkpoint.curve_fit import Floats


@dataclass(frozen=True, slots=True)
class Risk:
    rate: Floats
    """How often per second work is lost."""
    value: Floats
    """What losing one second of work costs, in the objective's own unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """One entry per stretch of training, in the objective's own unit."""

    seconds: Floats
    checkpoint: Floats
    risks: tuple[Risk, ...]

    @property
    def exposure(self) -> Floats:
        return np.asarray(sum(risk.rate * risk.value for risk in self.risks))


def intervals_s(prices: Prices, *, charge: float = 0.0) -> Floats:
    """The best time between checkpoints, to first order, in each stretch; infinite without risk."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.sqrt(2 * (prices.checkpoint + charge) / prices.exposure))


def benefit(prices: Prices, *, step_s: float) -> float:
    """By how much dearer a checkpoint at the end of the first stretch could be and still pay.

    Negative when it pays more to wait for another step.
    """
    since_s, price = float(prices.seconds[0]), float(prices.checkpoint[0])
    # Of two boundaries a step apart the better is told by their geometric mean, against tau.
    return float(prices.exposure[0]) * since_s * (since_s + step_s) / 2 - price


def number_taken(prices: Prices, *, charge: float) -> float:
    """How many checkpoints all stretches take if each costs `charge` more."""
    return float(np.sum(prices.seconds / intervals_s(prices, charge=charge)))


def charge_for(prices: Prices, *, at_most: float) -> float:
    """The extra price per checkpoint at which no more than `at_most` are taken in all stretches."""
    if number_taken(prices, charge=0.0) <= at_most:
        return 0.0
    # With this charge alone, and a price of nothing, it would be exactly as many.
    low, high = 0.0, (float(np.sum(prices.seconds * np.sqrt(prices.exposure / 2))) / at_most) ** 2
    for _ in range(30):
        middle = (low + high) / 2
        is_enough = number_taken(prices, charge=middle) <= at_most
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def place(prices: Prices, *, at_most: int | None = None) -> tuple[int, ...]:
    """The stretches after which to checkpoint, counted from 1, so that the price is least.

    Never after the last: the end of a job is saved anyway.
    """
    segments = _Segments.of(prices)
    marks = segments.cheapest(charge=0.0)
    if at_most is None or len(marks) <= at_most:
        return marks
    if at_most <= 0:
        return ()
    return _capped(segments, marks, at_most, guess=charge_for(prices, at_most=at_most))


def expected_price(prices: Prices, marks: Sequence[int]) -> float:
    """What checkpoints after these stretches cost, with the work that is expected to be lost."""
    return _Segments.of(prices).price(marks)


def place_evenly(num_stretches: int, number: int) -> tuple[int, ...]:
    """So many checkpoints at equal distances, rounded to the nearest boundary."""
    ends = {round(k * num_stretches / (number + 1)) for k in range(1, number + 1)}
    return tuple(sorted(ends - {0, num_stretches}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """Prices of segments between boundaries 0 to N, from sums up to each boundary.

    A segment from a to b loses `lost[b] - lost[a] - worth[a] * (danger[b] - danger[a])`.
    """

    checkpoint: Floats
    danger: Floats
    """Expected losses up to each boundary, one row per risk."""
    worth: Floats
    """Value of the work up to each boundary, one row per risk."""
    lost: Floats
    """What they would cost if there were no checkpoint but the start."""

    @staticmethod
    def of(prices: Prices) -> _Segments:
        d_danger = np.array([risk.rate * prices.seconds for risk in prices.risks])
        d_worth = np.array([risk.value * prices.seconds for risk in prices.risks])
        worth = _sums(d_worth)
        # A failure comes, on average, in the middle of a stretch.
        lost = _sums((d_danger * (worth[:, :-1] + d_worth / 2)).sum(axis=0, keepdims=True))
        return _Segments(
            checkpoint=np.concatenate(([0.0], prices.checkpoint)),
            danger=_sums(d_danger),
            worth=worth,
            lost=lost[0],
        )

    def price(self, marks: Sequence[int]) -> float:
        num = len(self.lost) - 1
        ends = np.array([*marks, num])
        begins = np.array([0, *marks])
        apart = (self.worth[:, begins] * (self.danger[:, ends] - self.danger[:, begins])).sum()
        paid = self.checkpoint[list(marks)].sum() if marks else 0.0
        return float(self.lost[-1] - apart + paid)

    def cheapest(self, *, charge: float) -> tuple[int, ...]:
        """The marks of the cheapest way from boundary 0 to N."""
        num = len(self.lost) - 1
        came_from = np.zeros(num + 1, dtype=np.int64)
        to_leave = np.zeros(num + 1)
        at_stake = (self.worth * self.danger).sum(axis=0)
        low = 0
        for end in range(1, num + 1):
            window = to_leave[low:end] - self.danger[:, end] @ self.worth[:, low:end]
            best = int(window.argmin())
            low += best
            came_from[end] = low
            to_leave[end] = window[best] + self.checkpoint[end] + charge + at_stake[end]
        marks = []
        at = int(came_from[num])
        while at > 0:
            marks.append(at)
            at = int(came_from[at])
        return tuple(reversed(marks))


def _sums(rows: Floats) -> Floats:
    return np.concatenate((np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)), axis=1)


def _capped(
    segments: _Segments, many: tuple[int, ...], at_most: int, *, guess: float
) -> tuple[int, ...]:
    """Raises the charge until the number fits; joins the two ways nearest to it on a tie."""
    low, high = 0.0, max(guess, 1e-12 * float(segments.lost[-1]))
    few = segments.cheapest(charge=high)
    while len(few) > at_most:
        low, high, many = high, 2 * high, few
        few = segments.cheapest(charge=high)
    while len(few) < at_most and high - low > 1e-13 * high:
        # The guess is near, so from there downwards rather than by halves from nothing.
        middle = (low + high) / 2 if low > 0 else 0.8 * high
        marks = segments.cheapest(charge=middle)
        if len(marks) <= at_most:
            high, few = middle, marks
        else:
            low, many = middle, marks
    return few if len(few) == at_most else _joined(few, many, at_most)


def _joined(few: tuple[int, ...], many: tuple[int, ...], number: int) -> tuple[int, ...]:
    """A way with exactly `number` marks out of two that are equally good with fewer and more.

    Somewhere a segment of `few` holds a whole segment of `many` that comes `number - len(few)`
    segments later; changing from one way to the other there costs nothing (Aggarwal, Schieber and
    Tokuyama, "Finding a minimum-weight k-link path in graphs with the concave Monge property").
    """
    end = float("inf")
    begins, ends = (0, *few), (*few, end)
    others = (0, *many)
    other_ends = (*many, end)
    more = number - len(few)
    for at in range(len(begins)):
        other = at + more
        if begins[at] <= others[other] and other_ends[other] <= ends[at]:
            return many[:other] + few[at:]
    return few
