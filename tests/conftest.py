"""Profiles for hypothesis: the tests run a seeded one; `HYPOTHESIS_PROFILE=deep` digs by hand.
Soaks, which take minutes, run by hand too: `pytest tests/chaos -m soak`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", deadline=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: a long run under faults; only with -m soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(pytest.mark.skip(reason="a soak: run it with -m soak"))
