"""Where the time of a step goes."""

from __future__ import annotations

from everstep.core.clock import ManualClock
from everstep.execute.timing import FORWARD, StepTimes


def test_an_action_on_a_device_lasts_until_the_device_is_done_if_that_is_asked_for() -> None:
    for is_asked, expected in ((True, 5.0), (False, 2.0)):
        clock = ManualClock()
        settle = (lambda clock=clock: clock.advance(3.0)) if is_asked else None
        times = StepTimes(clock, settle=settle)
        with times.measure(FORWARD):
            clock.advance(2.0)
        assert times.samples[FORWARD] == [expected]
