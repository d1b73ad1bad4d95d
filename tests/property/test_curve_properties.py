"""Loss curves: the units do not matter, spikes do not matter, known curves are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.curve import Curve, LossHistory
from everstep.checkpoint.curve_fit import Family, Floats

POWERS_OF_TWO = st.sampled_from([2.0**k for k in (-12, -3, 1, 7, 20)])
"""Scaling by them is exact in floating point, so the same curve must come out bit for bit."""


@st.composite
def runs(draw: st.DrawFn) -> Floats:
    steps = np.arange(1, draw(st.integers(20, 400)) + 1)
    rate, floor = draw(st.floats(0.5, 30)), draw(st.floats(-2, 2))
    noise = np.random.default_rng(draw(st.integers(0, 999))).normal(size=len(steps))
    falling = np.exp(-rate * steps / len(steps))
    if draw(st.booleans()):
        falling = (1 + 10 * rate * steps / len(steps)) ** -0.5
    return np.asarray(floor + falling + draw(st.sampled_from([0.0, 0.003, 0.05, 0.5])) * noise)


def history_of(steps: Floats, losses: Floats) -> LossHistory:
    history = LossHistory()
    for step, loss in zip(steps, losses, strict=True):
        history.add(float(step), float(loss))
    return history


def steps_of(losses: Floats) -> Floats:
    return np.arange(1.0, len(losses) + 1)


@given(losses=runs(), of_steps=POWERS_OF_TWO, of_loss=POWERS_OF_TWO)
@settings(max_examples=40, deadline=None)
def test_the_units_of_steps_and_loss_change_nothing_but_units(
    losses: Floats, of_steps: float, of_loss: float
) -> None:
    steps = steps_of(losses)
    plain = history_of(steps, losses).curve()
    scaled = history_of(steps * of_steps, losses * of_loss).curve()
    if plain is None or scaled is None:
        assert plain is scaled
        return
    assert scaled.family is plain.family
    assert (scaled.rate, scaled.offset) == (plain.rate, plain.offset)
    ahead = np.linspace(1, 3 * len(losses), 20)
    np.testing.assert_allclose(
        scaled.losses(ahead * of_steps), plain.losses(ahead) * of_loss, rtol=1e-12
    )
    assert scaled.slope(50.0 * of_steps) * of_steps == pytest.approx(plain.slope(50.0) * of_loss)


@given(losses=runs())
@settings(max_examples=40, deadline=None)
def test_a_curve_never_rises_and_its_slope_is_its_slope(losses: Floats) -> None:
    curve = history_of(steps_of(losses), losses).curve()
    if curve is None:
        return
    ahead = np.linspace(0, 5 * len(losses), 200)
    assert np.all(np.diff(curve.losses(ahead)) <= 0)
    for step in (curve.first_step + 1, 2.0 * len(losses)):
        width = 1e-4 * step
        slope = (curve.loss(step + width) - curve.loss(step - width)) / (2 * width)
        assert curve.slope(step) == pytest.approx(slope, rel=1e-3, abs=1e-9)
        assert curve.slope(step) <= 0


@given(seed=st.integers(0, 10_000), level=st.floats(-5, 5))
@settings(max_examples=40, deadline=None)
def test_mere_noise_seldom_looks_like_a_curve_and_never_promises_much(
    seed: int, level: float
) -> None:
    noise = np.random.default_rng(seed).normal(size=300)
    curve = history_of(steps_of(noise), level + noise).curve()
    if curve is not None:
        assert curve.loss(300) > level - 3


@given(rate=st.floats(2, 12), floor=st.floats(-3, 3), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_an_exponential_with_noise_and_spikes_is_told_well_ahead(
    rate: float, floor: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    num = 400
    steps = np.arange(1.0, num + 1)
    truth = floor + np.exp(-rate * steps / num)
    losses = truth + 0.01 * draw.normal(size=num)
    losses[draw.integers(0, num, 8)] += 50.0
    curve = history_of(steps[:300], losses[:300]).curve()
    assert curve is not None
    assert np.abs(curve.losses(steps[300:]) - truth[300:]).max() < 0.1


@given(losses=runs(), at=st.floats(0.1, 0.9))
@settings(max_examples=25, deadline=None)
def test_a_history_that_was_kept_and_read_again_goes_on(losses: Floats, at: float) -> None:
    cut = int(at * len(losses))
    steps = steps_of(losses)
    before = history_of(steps[:cut], losses[:cut])
    after = LossHistory.from_json(before.to_json())
    for step, loss in zip(steps[cut:], losses[cut:], strict=True):
        after.add(float(step), float(loss))
    curve, whole = after.curve(), history_of(steps, losses).curve()
    if curve is not None and whole is not None and len(losses) > 100:
        assert isinstance(curve, Curve)
        assert curve.loss(len(losses)) == pytest.approx(whole.loss(len(losses)), abs=0.5)


def test_every_family_is_found_when_it_is_the_truth() -> None:
    x = np.arange(1.0, 601) / 600
    shapes = {Family.EXPONENTIAL: np.exp(-6 * x), Family.POWER_LAW: (1 + x / 0.01) ** -0.4}
    for family, shape in shapes.items():
        curve = history_of(steps_of(x), 0.7 + 2.0 * shape).curve()
        assert curve is not None
        assert curve.family is family
