from __future__ import annotations

import json

import pytest

from everstep.checkpoint.failure_rate import FailureRate
from everstep.core.errors import ConfigError

HOUR = 3600.0


def per_worker_hour(rate: FailureRate) -> float:
    return rate.per_second() * HOUR


def test_nothing_seen_gives_the_prior() -> None:
    assert per_worker_hour(FailureRate()) == pytest.approx(1 / 5e4, rel=1e-3)


def test_it_is_in_proportion_to_the_workers() -> None:
    assert FailureRate().per_second(12) == pytest.approx(12 * FailureRate().per_second())


def test_a_few_failures_outweigh_the_prior_to_within_a_factor_of_two() -> None:
    rate = FailureRate()
    for _ in range(5):
        rate = rate.seen(seconds=HOUR, workers=4, failures=1)
    assert 0.5 < per_worker_hour(rate) / (5 / 20) < 2


def test_one_failure_says_much_but_not_all() -> None:
    rate = FailureRate().seen(seconds=4 * HOUR, failures=1)
    assert 1e-4 < per_worker_hour(rate) < 1 / 4


def test_quiet_weeks_lower_it() -> None:
    quiet = FailureRate().seen(seconds=30 * 24 * HOUR, workers=512)
    assert per_worker_hour(quiet) < 0.2 / 5e4


def test_failures_that_were_made_good_add_time_but_no_failure() -> None:
    masked = FailureRate().seen(seconds=HOUR, workers=8)
    assert masked.failures == 0
    assert masked.worker_seconds == 8 * HOUR
    assert masked.per_second() <= FailureRate().per_second()


def test_it_survives_json() -> None:
    rate = FailureRate(prior_worker_hours=100.0).seen(seconds=10.5, workers=3, failures=2)
    assert FailureRate.from_json(json.loads(json.dumps(rate.to_json()))) == rate


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"format": 2, "failures": 0, "worker_seconds": 0},
        {"format": 1, "failures": "3", "worker_seconds": 0},
        {"format": 1, "failures": 1, "worker_seconds": None},
        {"format": 1, "failures": -1, "worker_seconds": 0},
        {"format": 1, "failures": 1, "worker_seconds": float("nan")},
    ],
)
def test_other_documents_are_refused(document: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        FailureRate.from_json(document)
