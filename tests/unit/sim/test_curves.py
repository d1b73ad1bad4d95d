"""The picture of a report: thinned curves keep their mean, and axes have round numbers."""

from __future__ import annotations

import re

import pytest

from everstep.sim.curves import NUM_SPANS, nodes_up, picture, span_means
from everstep.sim.generate import Kind, Rates, generate
from everstep.sim.model import PRESETS, describe
from everstep.sim.results import simulate
from everstep.sim.setting import Failures, Setting
from everstep.sim.trace import make_trace


def test_a_pause_shorter_than_a_span_still_counts() -> None:
    means = span_means([0.0, 100.0, 101.0], [2.0, 0.0, 2.0], 480.0 * 60)
    assert len(means) == NUM_SPANS
    assert means[1] == pytest.approx(2.0 * 59 / 60)
    assert sum(means) / NUM_SPANS == pytest.approx(2.0 * (480 * 60 - 1) / (480 * 60))


def test_nodes_that_are_up_start_without_those_that_come_later() -> None:
    rows = [(10.0, 0, True), (20.0, 2, False)]
    trace = make_trace(rows, name="t", num_nodes=3, duration_s=60.0, starts_down=[2])
    assert nodes_up(trace) == ([0.0, 10.0, 20.0], [2.0, 1.0, 2.0])


def test_every_system_has_a_strip_with_its_average() -> None:
    trace = generate(
        Kind.EXPONENTIAL,
        Rates(mtbf_s=86400.0, repair_s=7200.0),
        num_nodes=8,
        duration_s=3 * 86400.0,
        seed=0,
    )
    job = describe(PRESETS["gpt-1.3b"].model, name="m", replicas=4, stages=2, microbatches=4)
    setting = Setting(job=job, failures=Failures.of(trace))
    outcomes = simulate(trace, setting, systems=["everstep", "torchft", "ideal"])
    drawn = picture(outcomes, trace)
    texts = re.findall(r">([^<]+)</text>", drawn)
    for outcome in outcomes:
        assert outcome.system in texts
        assert f"{outcome.throughput:.4g}" in texts
    assert drawn.count("<polygon") == 1 + len(outcomes)
    assert texts[-1] == "3"
    assert "days" in texts
