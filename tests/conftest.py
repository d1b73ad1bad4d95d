"""Profiles for hypothesis: the tests run a seeded one; `HYPOTHESIS_PROFILE=deep` digs by hand.

And Ctrl-C: a shell starts what it runs in the background with SIGINT ignored, and all that the
tests start would inherit that.
"""

from __future__ import annotations

import os
import signal

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
