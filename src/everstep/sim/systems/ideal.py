"""The fault-scaled ideal: everstep's fault-free throughput times the share of live workers.

No pause, no checkpoint. Nothing real reaches it by sharing work alone; filling bubbles can.
"""

from __future__ import annotations

import math

from everstep.sim.account import Account
from everstep.sim.periods import Periods
from everstep.sim.setting import Setting


class Ideal:
    name = "ideal"
    does_not_fit: str | None = None

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._live = setting.num_workers
        self.fault_free_step_s = Periods(setting.job.problem()).fault_free.period

    def begin(self, lost: list[int], account: Account) -> None:
        self.change(lost, [], account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        self._live += len(joined) - len(lost)
        needed = self._setting.job.num_workers
        live = min(self._live, needed)
        account.run_at(self.fault_free_step_s * needed / live if live else math.inf)
