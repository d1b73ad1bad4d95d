"""Spares: some nodes of the same cluster stand by; a loss is answered by a restart with a spare.

On equal hardware, so the job has fewer replicas from the start. When the spares are used up, it
drops to fewer replicas, as the elastic restart does. A loss of a spare costs nothing.
"""

from __future__ import annotations

from everstep.checkpoint.baselines import YoungDaly
from everstep.sim.account import Account
from everstep.sim.setting import Setting
from everstep.sim.systems.restart import Restart


class Spares:
    def __init__(self, setting: Setting) -> None:
        job, size = setting.job, setting.workers_per_node
        num_spares = setting.num_spares
        if num_spares is None:
            num_spares = -(-job.stages // size)
        active = (setting.num_workers - num_spares * size) // job.stages
        self.name = f"spares ({num_spares} nodes)"
        self._inner = Restart(
            setting,
            name=self.name,
            policy=setting.policy or YoungDaly(),
            most_replicas=max(1, min(active, job.replicas)),
        )
        self.does_not_fit = self._inner.does_not_fit
        self.fault_free_step_s = self._inner.fault_free_step_s
        # Who idles is lost for free: the first of the cluster's workers train, the last stand by,
        # and a worker that comes back stands by.
        self._num_places = max(1, min(active, job.replicas)) * job.stages
        self._training = set(range(self._num_places))
        self._standby: set[int] = set(range(self._num_places, setting.num_workers))

    def begin(self, lost: list[int], account: Account) -> None:
        self._standby.difference_update(lost)
        self._training.difference_update(lost)
        self._fill_up()
        self._inner.begin(lost, account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        idle = [worker for worker in lost if worker in self._standby]
        hit = [worker for worker in lost if worker in self._training]
        self._standby.difference_update(lost)
        self._training.difference_update(lost)
        self._standby.update(joined)
        self._fill_up()
        self._inner.note_idle(len(idle))
        self._inner.change(hit, joined, account)

    def _fill_up(self) -> None:
        while len(self._training) < self._num_places and self._standby:
            worker = min(self._standby)
            self._standby.remove(worker)
            self._training.add(worker)
