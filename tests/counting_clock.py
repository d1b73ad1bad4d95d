"""A clock for the improver: its budget becomes a number of attempts, the same on every machine."""

from __future__ import annotations

from everstep.core.clock import ManualClock


class CountingClock(ManualClock):
    """Every look at it takes a second."""

    def now_s(self) -> float:
        self.advance(1.0)
        return super().now_s()
