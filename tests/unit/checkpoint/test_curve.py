from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from everstep.checkpoint.curve import LossHistory
from everstep.checkpoint.curve_fit import Floats
from everstep.core.errors import ConfigError


def fed(losses: Floats, history: LossHistory | None = None, first: int = 1) -> LossHistory:
    history = history or LossHistory()
    for step, loss in enumerate(losses, start=first):
        history.add(step, float(loss))
    return history


def falling(num: int, *, seed: int = 0, noise: float = 0.02) -> Floats:
    draw = np.random.default_rng(seed)
    return np.asarray(1 + 2 * np.exp(-5 * np.arange(num) / num) + noise * draw.normal(size=num))


def test_too_few_losses_give_no_curve() -> None:
    assert fed(falling(500)[:12]).curve() is None


def test_a_constant_loss_gives_no_curve() -> None:
    assert fed(np.full(200, 1.5)).curve() is None


def test_a_learning_rate_drop_begins_a_new_curve_that_knows_what_was_gained_before() -> None:
    before = falling(600)
    after = (
        0.3 + 0.7 * np.exp(-np.arange(300) / 60) + 0.02 * np.random.default_rng(1).normal(size=300)
    )
    history = fed(before)
    first = history.curve()
    assert first is not None
    fed(after, history, first=601)
    curve = history.curve()
    assert curve is not None
    assert 560 <= curve.first_step <= 640
    assert curve.gained_before == pytest.approx(2.0, abs=0.15)
    assert curve.loss(900) == pytest.approx(0.3, abs=0.08)
    assert curve.gained(900) == pytest.approx(2.7, abs=0.2)


def test_a_diverging_run_has_no_curve() -> None:
    rising = 1 + np.exp(np.arange(200) / 20)
    history = fed(rising, fed(falling(600)), first=601)
    assert history.curve() is None


def test_a_loss_that_is_no_number_ends_the_curve_and_a_later_recovery_begins_one() -> None:
    history = fed(falling(300))
    assert history.curve() is not None
    history.add(301, math.nan)
    assert history.curve() is None
    fed(falling(300), history, first=302)
    assert history.curve() is not None


def test_steps_that_are_run_again_replace_the_old_ones() -> None:
    losses = falling(400)
    straight = fed(losses)
    twice = fed(losses[:300])
    fed(losses[200:], twice, first=201)
    ours, theirs = twice.curve(), straight.curve()
    assert ours is not None
    assert theirs is not None
    assert ours.loss(400) == pytest.approx(theirs.loss(400), abs=0.03)


def test_a_long_job_stays_a_few_hundred_points() -> None:
    history = LossHistory()
    for step in range(1, 10_001):
        history.add(step, 1 + 1 / step)
    points = history.to_json()["points"]
    assert isinstance(points, list)
    assert 64 <= len(points) <= 64 * (2 + math.log(10_000 / 64))


def test_a_history_survives_json_with_its_curve() -> None:
    history = fed(falling(500))
    again = LossHistory.from_json(json.loads(json.dumps(history.to_json())))
    ours, theirs = again.curve(), history.curve()
    assert ours is not None
    assert theirs is not None
    assert ours.loss(700) == pytest.approx(theirs.loss(700), abs=0.02)


@pytest.mark.parametrize("document", [{}, {"points": [[1]]}, {"points": 3, "steps_ever": 1}])
def test_a_history_of_another_form_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="loss history"):
        LossHistory.from_json(document)


def test_a_fit_in_the_middle_of_training_imports_nothing() -> None:
    """The first fit, after 16 steps, imported scipy's optimizers: that step took half a second
    longer in every job that saves, and no event told why. The polish is our own now, and scipy is
    not needed any more."""
    program = """
import sys
import numpy as np
from everstep.checkpoint.curve_fit import fit_curve
before = set(sys.modules)
steps = np.arange(1.0, 33.0)
assert fit_curve(steps, 1 + 3 / steps, np.ones_like(steps)) is not None
sys.exit(sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"numpy"}) or None)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
