"""Profiles for hypothesis: the tests run a seeded one; `HYPOTHESIS_PROFILE=deep` digs by hand.

And two lanes: `make test` runs two tests at a time, but never two jobs of many workers.

And Ctrl-C: a shell starts what it runs in the background with SIGINT ignored, and all that the
tests start would inherit that.
"""

from __future__ import annotations

import os
import signal

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

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SAVING = ("test_autosave", "test_checkpoint", "test_crash", "test_ddp", "test_light", "test_transf")
"""Files of multi-process tests that start no job: savers, and other libraries' trainers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ("chaos", "multiprocess"):
            lane = "savers" if item.path.name.startswith(SAVING) else "jobs"
            item.add_marker(pytest.mark.xdist_group(lane))
