"""Runs the simulator beside a live run: the same changes at the same steps, in its own time.

A loss strikes where it struck, so many seconds after a step was finished, and not at the same time
of the clock: a replay that is ahead would be hit in another part of a step, and what a loss throws
away would be luck. Moves between stages are in the file, each a loss and a join, so the replay
decides none.
"""

from __future__ import annotations

import math

from everstep.core.errors import ConfigError
from everstep.schedule.problem import Variant
from everstep.sim.account import Account
from everstep.sim.live_run import LiveRun
from everstep.sim.setting import Setting
from everstep.sim.systems.everstep import Rerouting

SHY_OF_A_STEP = 1e-6
"""A loss that came later than the replay's step would have ended finds it so far from its end."""


def replay(live: LiveRun, setting: Setting) -> list[float]:
    """How long each stretch of the run takes."""
    system = Rerouting(
        setting, name="everstep", variant=Variant.DECOUPLED_STAGGERED, is_normalizing=False
    )
    account = Account(samples_per_step=1)
    system.begin([], account)
    predicted_s = []
    for step, stretch in enumerate(live.stretches):
        began_s = account.now_s
        for change in stretch.changes:
            if change.lost:
                account.advance(_struck_s(account, began_s + change.time_s, step))
            system.change(list(change.lost), list(change.joined), account)
            _check(live, account, step)
        account.advance(account.reaches_s(step + 1))
        predicted_s.append(account.now_s - began_s)
    return predicted_s


def _struck_s(account: Account, time_s: float, step: int) -> float:
    """The step was not finished in the run, so it is not in the replay."""
    return max(account.now_s, min(time_s, account.reaches_s(step + 1 - SHY_OF_A_STEP)))


def _check(live: LiveRun, account: Account, step: int) -> None:
    if account.num_roll_backs or math.isinf(account.step_s):
        at_s = sum(stretch.seconds for stretch in live.stretches[:step])
        rule = (
            f"after {at_s:.1f} s a stage has no worker left; what is restored from checkpoints or"
            " logs is not replayed"
        )
        raise ConfigError("events file", live.trace.name, rule)
