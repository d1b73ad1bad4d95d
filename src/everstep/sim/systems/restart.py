"""Elastic restart: every loss restarts all workers from the last checkpoint, with as many whole
replicas as are left; every join restarts them too, after a save.

The batch stays: fewer replicas run more micro-batches each, under 1F1B. Below one replica, waiting.
Spares are the same with fewer replicas from the start and idle nodes that step in.
"""

from __future__ import annotations

import math

from everstep.checkpoint.policy import Policy
from everstep.sim.account import Account, Cause
from everstep.sim.memory import does_not_fit
from everstep.sim.periods import one_f_one_b_s
from everstep.sim.setting import Setting


class Restart:
    def __init__(
        self,
        setting: Setting,
        *,
        name: str,
        policy: Policy,
        most_replicas: int | None = None,
    ) -> None:
        job = setting.job
        self.name = name
        self.does_not_fit = does_not_fit(job, in_flight=min(job.stages, job.microbatches))
        self._setting = setting
        self._job = job
        self._policy = policy
        self._most_replicas = job.replicas if most_replicas is None else most_replicas
        self._durations = job.durations()
        self._steps_s: dict[int, float] = {}
        self._live = setting.num_workers
        self._replicas = 0
        self.fault_free_step_s = self._step_s(self._most_replicas)

    def begin(self, lost: list[int], account: Account) -> None:
        self._live -= len(lost)
        self._go_on(account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        self._live += len(joined) - len(lost)
        setting = self._setting
        is_hit = bool(lost) and self._replicas > 0
        can_grow = self._possible() > self._replicas
        if is_hit:
            self._lose(account)
        elif can_grow and self._replicas:
            account.save_now()
        if is_hit or can_grow:
            noticing_s = setting.noticing_s if is_hit else 0.0
            account.pause(
                (Cause.NOTICING, noticing_s),
                (Cause.RESTART, max(0.0, setting.constants.restart_s - noticing_s)),
                (Cause.GROUPS, setting.constants.forming_s(self._live)),
                (Cause.LOADING, setting.load_s),
            )
            self._go_on(account)

    def note_idle(self, num_lost: int) -> None:
        """Workers that stood by are gone; nobody else notices."""
        self._live -= num_lost

    def _lose(self, account: Account) -> None:
        account.rungs["checkpoint"] += 1
        costs = self._setting.save_costs(self.fault_free_step_s)
        if self._setting.failures.notice_s >= costs.durable_s:
            account.save_now()
        else:
            account.roll_back()

    def _possible(self) -> int:
        return min(self._live // self._job.stages, self._most_replicas)

    def _go_on(self, account: Account) -> None:
        self._replicas = self._possible()
        if not self._replicas:
            account.run_at(math.inf)
            return
        step_s = self._step_s(self._replicas)
        account.run_at(step_s)
        self._setting.start_saving(
            account,
            step_s,
            policy=self._policy,
            failure_rate=self._setting.failures.losses_per_second,
        )

    def _step_s(self, replicas: int) -> float:
        if replicas < 1:
            return math.inf
        if replicas not in self._steps_s:
            microbatches = -(-self._job.batch_microbatches // replicas)
            self._steps_s[replicas] = one_f_one_b_s(self._durations, microbatches)
        return self._steps_s[replicas]


def restart(setting: Setting, policy: Policy, *, name: str) -> Restart:
    return Restart(setting, name=f"restart, {name}", policy=policy)
