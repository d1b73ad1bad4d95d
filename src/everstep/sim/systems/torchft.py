"""torchft-like: a lost worker takes its whole replica out until it is there again.

The others go on after the quorum with a smaller batch, so throughput is the share of whole
replicas. A replica comes back when all its workers are; it heals beside the others. With no whole
replica left: a restart from the last checkpoint once there is one again.
"""

from __future__ import annotations

import math

from everstep.checkpoint.baselines import YoungDaly
from everstep.sim.account import Account, Cause
from everstep.sim.memory import does_not_fit
from everstep.sim.periods import one_f_one_b_s
from everstep.sim.setting import Setting


class TorchFT:
    name = "torchft-like"

    def __init__(self, setting: Setting) -> None:
        job = setting.job
        self.does_not_fit = does_not_fit(job, in_flight=min(job.stages, job.microbatches))
        self._setting = setting
        self._policy = setting.policy or YoungDaly()
        self._job = job
        self._missing = [0] * job.replicas
        self.fault_free_step_s = one_f_one_b_s(job.durations(), job.microbatches)

    def begin(self, lost: list[int], account: Account) -> None:
        self._count(lost, 1)
        self._go_on(account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        before = self._whole()
        self._count(lost, 1)
        num_gone = before - self._whole()
        self._count(joined, -1)
        after = self._whole()
        if num_gone:
            self._lose(account, is_last_gone=num_gone == before)
        elif after > before:
            self._heal(account, was_stopped=before == 0)
        self._go_on(account)

    def _lose(self, account: Account, *, is_last_gone: bool) -> None:
        if is_last_gone:
            account.rungs["checkpoint"] += 1
            account.roll_back()
            return
        account.rungs["replica out"] += 1
        account.drop_partial_step()
        constants = self._setting.constants
        account.pause(
            (Cause.NOTICING, self._setting.noticing_s),
            (Cause.GROUPS, constants.torchft_quorum_s + constants.forming_s(self._whole())),
        )

    def _heal(self, account: Account, *, was_stopped: bool) -> None:
        """The new replica loads in its own time; the others only form groups with it."""
        constants = self._setting.constants
        load_s = self._setting.load_s
        account.rungs["replica back"] += 1
        if was_stopped:
            account.pause((Cause.RESTART, constants.torchft_rejoin_s), (Cause.LOADING, load_s))
        else:
            account.pause((Cause.GROUPS, constants.forming_s(self._whole())))

    def _count(self, workers: list[int], sign: int) -> None:
        for worker in workers:
            if worker < self._job.num_workers:
                self._missing[worker // self._job.stages] += sign

    def _whole(self) -> int:
        return self._missing.count(0)

    def _go_on(self, account: Account) -> None:
        whole = self._whole()
        if not whole:
            account.run_at(math.inf)
            return
        step_s = self.fault_free_step_s * self._job.replicas / whole
        account.run_at(step_s)
        self._setting.start_saving(account, step_s, policy=self._policy)
