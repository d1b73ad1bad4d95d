"""Oobleck (Jang et al., SOSP 2023): pipelines of different lengths from prepared templates.

    a loss    the pipeline takes the template for one worker less; if that cannot hold the model it
              borrows a worker from the longest pipeline; if none can spare one it is dissolved, and
              its workers join the others
    a join    goes to the shortest pipeline; a dissolved one comes back when all have their length
    a step    as long as the slowest pipeline's, with the batch spread so that the slowest is
              fastest, under 1F1B

A change costs the interrupted step, groups, and copying the layers of the largest new stage. A
generous model: templates are cut for the best balance, and borrowing is free of further copies.
"""

from __future__ import annotations

import math
from collections import Counter

from everstep.checkpoint.baselines import YoungDaly
from everstep.sim.account import Account, Cause
from everstep.sim.setting import Setting
from everstep.sim.systems.templates import Templates

NOWHERE = -1
"""The pipeline of a worker that is lost or left over."""


class Oobleck:
    name = "oobleck"

    def __init__(self, setting: Setting) -> None:
        job = setting.job
        self._setting = setting
        self._policy = setting.policy or YoungDaly()
        self._job = job
        self._templates = Templates(job)
        self._fewest = self._templates.fewest_workers or 0
        self.does_not_fit = None
        if not self._fewest or self._fewest > job.stages:
            self.does_not_fit = (
                f"no pipeline of {job.stages} workers holds the model"
                f" ({job.device_bytes / 1e9:.0f} GB per device)"
            )
        self._is_up = [True] * setting.num_workers
        self._pipeline_of = [NOWHERE] * setting.num_workers
        self._sizes = [job.stages] * job.replicas
        self._steps_s: dict[tuple[tuple[int, int], ...], float] = {}
        self.fault_free_step_s = math.inf if self.does_not_fit else self._step_s()

    def begin(self, lost: list[int], account: Account) -> None:
        for worker in lost:
            self._is_up[worker] = False
        self._instantiate()
        self._go_on(account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        was_stopped = not any(self._sizes)
        hit = [worker for worker in lost if self._pipeline_of[worker] != NOWHERE]
        for worker in lost:
            self._is_up[worker] = False
            self._remove(worker)
        for worker in joined:
            self._is_up[worker] = True
        if was_stopped:
            self._instantiate()
        else:
            self._mend(self._fewest)
            if not any(self._sizes):
                account.rungs["checkpoint"] += 1
                account.roll_back()
                self._instantiate()
                was_stopped = True
            for worker in joined:
                self._add(worker)
        if hit or joined:
            self._reconfigure(account, is_loss=bool(hit), was_stopped=was_stopped)
        self._go_on(account)

    def _reconfigure(self, account: Account, *, is_loss: bool, was_stopped: bool) -> None:
        sizes = [size for size in self._sizes if size]
        if not sizes:
            return
        setting = self._setting
        largest = max(self._templates.template(size).stage_bytes for size in set(sizes))
        account.rungs["new templates" if is_loss else "join"] += 1
        account.drop_partial_step()
        cause = Cause.LOADING if was_stopped else Cause.COPY
        links = setting.job.links
        account.pause(
            (Cause.NOTICING, setting.noticing_s if is_loss else 0.0),
            (
                Cause.GROUPS,
                setting.constants.oobleck_rebuild_s + setting.constants.forming_s(sum(sizes)),
            ),
            (cause, largest / (links.disk if was_stopped else links.network)),
        )

    def _go_on(self, account: Account) -> None:
        if not any(self._sizes):
            account.run_at(math.inf)
            return
        step_s = self._step_s()
        account.run_at(step_s)
        self._setting.start_saving(account, step_s, policy=self._policy)

    # Pipelines.

    def _instantiate(self) -> None:
        """From nothing: whole pipelines first, then the rest one by one to the shortest."""
        live = [worker for worker, is_up in enumerate(self._is_up) if is_up]
        self._pipeline_of = [NOWHERE] * len(self._is_up)
        self._sizes = [0] * self._job.replicas
        if len(live) < self._fewest:
            return
        num_running = max(1, min(self._job.replicas, len(live) // self._job.stages))
        for turn, worker in enumerate(live[: num_running * self._templates.most_workers]):
            self._pipeline_of[worker] = turn % num_running
            self._sizes[turn % num_running] += 1

    def _remove(self, worker: int) -> None:
        pipeline = self._pipeline_of[worker]
        if pipeline != NOWHERE:
            self._sizes[pipeline] -= 1
            self._pipeline_of[worker] = NOWHERE

    def _add(self, worker: int) -> None:
        """To the shortest pipeline; or a dissolved one comes back, with workers of the others."""
        if self._pipeline_of[worker] != NOWHERE:
            return
        running = [number for number, size in enumerate(self._sizes) if size]
        live = sum(self._sizes) + 1
        if len(running) < len(self._sizes) and live >= (len(running) + 1) * self._job.stages:
            goal = self._sizes.index(0)
        else:
            goal = min(running, key=lambda number: self._sizes[number])
            if self._sizes[goal] >= self._templates.most_workers:
                return
        self._pipeline_of[worker] = goal
        self._sizes[goal] += 1
        self._mend(self._fewest if self._sizes[goal] > 1 else self._job.stages)

    def _mend(self, fewest: int) -> None:
        """Pipelines that are too short borrow, or are dissolved into the others."""
        for number in range(len(self._sizes)):
            while 0 < self._sizes[number] < fewest:
                donor = max(range(len(self._sizes)), key=lambda n: self._sizes[n])
                if self._sizes[donor] <= fewest:
                    self._dissolve(number)
                    break
                self._move(donor, number)

    def _dissolve(self, pipeline: int) -> None:
        others = [n for n, size in enumerate(self._sizes) if size and n != pipeline]
        while self._sizes[pipeline]:
            if not others:
                self._sizes[pipeline] = 0
                self._pipeline_of = [NOWHERE if p == pipeline else p for p in self._pipeline_of]
                return
            self._move(pipeline, min(others, key=lambda number: self._sizes[number]))

    def _move(self, donor: int, receiver: int) -> None:
        worker = self._pipeline_of.index(donor)
        self._pipeline_of[worker] = receiver
        self._sizes[donor] -= 1
        self._sizes[receiver] += 1

    # Steps.

    def _step_s(self) -> float:
        counts = Counter(min(size, self._templates.most_workers) for size in self._sizes if size)
        key = tuple(sorted(counts.items()))
        if key not in self._steps_s:
            self._steps_s[key] = self._balance(key)
        return self._steps_s[key]

    def _balance(self, counts: tuple[tuple[int, int], ...]) -> float:
        """The shortest step in which the pipelines together get through the batch."""
        templates = [(self._templates.template(size), number) for size, number in counts]
        wanted = self._job.batch_microbatches
        candidates = sorted(
            {template.step_s(m) for template, _ in templates for m in range(1, wanted + 1)}
        )
        low, high = 0, len(candidates) - 1
        while low < high:
            middle = (low + high) // 2
            done = sum(number * t.most_within(candidates[middle]) for t, number in templates)
            if done >= wanted:
                high = middle
            else:
                low = middle + 1
        return candidates[low]
