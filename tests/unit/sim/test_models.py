"""Jobs from descriptions: published sizes come out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everstep.core.errors import ConfigError
from everstep.sim.confidence import interval
from everstep.sim.constants import Constants, with_overrides
from everstep.sim.job import job_from_profile
from everstep.sim.model import PRESETS, describe, preset


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-350m", 0.356),
        ("gpt-1.3b", 1.32),
        ("gpt-2.7b", 2.65),
        ("gpt-6.7b", 6.66),
        ("gpt-18.4b", 18.4),
        ("gpt-39b", 39.1),
        ("gpt-145.6b", 145.6),
    ],
)
def test_presets_have_their_published_sizes(name: str, billions: float) -> None:
    assert preset(name).model.parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean gpt-6\.7b"):
        preset("gpt-6.8b")


def test_a_step_takes_what_its_operations_take() -> None:
    """6.7B parameters and 2,048 tokens: 6 operations for each, and the attention."""
    model = PRESETS["gpt-6.7b"].model
    job = describe(model, name="j", replicas=1, stages=1, microbatches=1)
    seconds = sum(layer.total for layer in job.layers)
    assert seconds == pytest.approx(6 * 6.66e9 * 2048 / (312e12 * 0.45), rel=0.1)


def test_the_first_stage_pays_for_its_input_gradients_with_w() -> None:
    model = PRESETS["gpt-1.3b"].model
    first, second, *_ = (
        describe(model, name="j", replicas=2, stages=4, microbatches=4).durations().stages
    )
    assert first.input_gradient == 0
    assert first.weight_gradient > second.weight_gradient


def test_memory_limits_what_is_in_flight() -> None:
    model = PRESETS["gpt-6.7b"].model
    job = describe(model, name="j", replicas=2, stages=8, microbatches=4)
    roomy, tight = job.in_flight(), replace(job, device_bytes=20e9).in_flight()
    assert roomy is not None
    assert tight is not None
    assert all(1 <= few < many for few, many in zip(tight, roomy, strict=True) if few and many)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="24 layers"):
        describe(PRESETS["gpt-1.3b"].model, name="j", replicas=1, stages=25, microbatches=1)


def test_a_profile_keeps_its_durations(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        '{"stages": [{"forward": 1, "input_gradient": 0, "weight_gradient": 2},'
        ' {"forward": 1, "input_gradient": 1, "weight_gradient": 1}], "optimizer": 0.5}'
    )
    job = job_from_profile(path, replicas=2, microbatches=4, state_bytes=1e9)
    assert job.durations().stages[0].weight_gradient == 2
    assert job.durations().optimizer == 0.5
    assert job.stage_state_bytes() == [1e9, 1e9]


def test_constants_are_overridden_by_name() -> None:
    assert with_overrides(Constants(), ["restart_s=9"]).restart_s == 9
    with pytest.raises(ConfigError, match="did you mean restart_s"):
        with_overrides(Constants(), ["restart=9"])
    with pytest.raises(ConfigError, match="NAME=NUMBER"):
        with_overrides(Constants(), ["restart_s=soon"])


def test_an_interval_narrows_with_more_values() -> None:
    assert interval([1.0, 3.0]).mean == 2
    assert interval([1.0, 3.0]).half_width == pytest.approx(12.71)
    assert interval([1.0, 3.0] * 20).half_width < 0.4
