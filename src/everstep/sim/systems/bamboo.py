"""Bamboo (Thorpe et al., NSDI 2023): each worker also holds, and computes ahead, the next stage.

    a loss       the worker before it takes the stage over: that pipeline goes on with one stage of
                 double length, without losing a step
    adjacent     two neighbours of one pipeline lost: a restart of all from the last checkpoint
    regrouping   whole pipelines from all live workers, the rest stands by; done when the time
                 saved until the next change is expected to exceed a rendezvous

Without failures a step takes `bamboo_slowdown` times as long, and the state needs twice the room.
Workers of one node sit in different pipelines, as Bamboo advises: consecutive ones are never
neighbours unless there are more workers on a node than pipelines.
"""

from __future__ import annotations

import math
from dataclasses import replace

from everstep.checkpoint.baselines import YoungDaly
from everstep.schedule.durations import StageDurations
from everstep.sim.account import Account, Cause
from everstep.sim.memory import does_not_fit
from everstep.sim.periods import one_f_one_b_s
from everstep.sim.setting import Setting

NOWHERE = -1
"""The pipeline of a worker that stands by."""


class Bamboo:
    name = "bamboo"

    def __init__(self, setting: Setting) -> None:
        job = setting.job
        self._setting = setting
        self._policy = setting.policy or YoungDaly()
        self._job = job
        self.does_not_fit = does_not_fit(
            job,
            state_factor=setting.constants.bamboo_state_factor,
            in_flight=min(job.stages, job.microbatches),
        )
        self._durations = job.durations()
        self._steps_s: dict[tuple[int, frozenset[int]], float] = {}
        self._is_up = [True] * setting.num_workers
        self._num_pipelines = 0
        self._place_of: dict[int, tuple[int, int]] = {}
        """Pipeline and stage of the workers that have one."""

        self._gone: dict[int, frozenset[int]] = {}
        """Per pipeline that has lost some, the stages that are taken over."""

        self._regroup()
        self.fault_free_step_s = self._step_s()

    def begin(self, lost: list[int], account: Account) -> None:
        for worker in lost:
            self._is_up[worker] = False
        self._regroup()
        self._go_on(account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        for worker in lost:
            self._is_up[worker] = False
        for worker in joined:
            self._is_up[worker] = True
        was_stopped = not self._num_pipelines
        hit = self._take_over(lost)
        if was_stopped:
            self._regroup()
            if self._num_pipelines:
                self._restart(account, is_loss=False)
        elif any(self._is_fatal(stages) for stages in self._gone.values()):
            account.rungs["checkpoint"] += 1
            account.roll_back()
            self._regroup()
            self._restart(account, is_loss=True)
        else:
            if hit:
                self._fail_over(account)
            self._regroup_if_it_pays(account)
        self._go_on(account)

    def _take_over(self, lost: list[int]) -> bool:
        is_hit = False
        for worker in lost:
            pipeline, stage = self._place_of.pop(worker, (NOWHERE, 0))
            if pipeline != NOWHERE:
                is_hit = True
                self._gone[pipeline] = self._gone.get(pipeline, frozenset()) | {stage}
        return is_hit

    def _is_fatal(self, stages: frozenset[int]) -> bool:
        """The stage before the first is the last."""
        return any((stage - 1) % self._job.stages in stages for stage in stages)

    def _fail_over(self, account: Account) -> None:
        account.rungs["taken over"] += 1
        account.drop_partial_step()
        num_live = self._num_pipelines * self._job.stages
        account.pause(
            (Cause.NOTICING, self._setting.noticing_s),
            (Cause.GROUPS, self._setting.constants.forming_s(num_live)),
        )

    def _restart(self, account: Account, *, is_loss: bool) -> None:
        setting = self._setting
        account.pause(
            (Cause.NOTICING, setting.noticing_s if is_loss else 0.0),
            (
                Cause.RESTART,
                setting.constants.bamboo_rendezvous_s + setting.constants.bamboo_node_creation_s,
            ),
            (Cause.LOADING, setting.load_s),
        )

    def _regroup_if_it_pays(self, account: Account) -> None:
        before_s, before = self._step_s(), (self._num_pipelines, self._place_of, self._gone)
        self._regroup()
        after_s = self._step_s()
        setting = self._setting
        rate = max(setting.failures.losses_per_second, 1e-12)
        cost_s = setting.constants.bamboo_rendezvous_s + 2 * setting.copy_s
        saved_fraction = 1 - after_s / before_s
        if saved_fraction / rate <= cost_s:
            self._num_pipelines, self._place_of, self._gone = before
            return
        account.rungs["regrouped"] += 1
        account.pause(
            (Cause.RESTART, setting.constants.bamboo_rendezvous_s), (Cause.COPY, 2 * setting.copy_s)
        )

    def _regroup(self) -> None:
        """Whole pipelines of those alive; a worker keeps its place where the grid allows."""
        job = self._job
        live = [worker for worker, is_up in enumerate(self._is_up) if is_up]
        number = self._num_pipelines = min(len(live) // job.stages, job.replicas)
        self._place_of = {
            worker: (turn % number, turn // number)
            for turn, worker in enumerate(live[: number * job.stages])
        }
        self._gone = {}

    def _go_on(self, account: Account) -> None:
        step_s = self._step_s()
        account.run_at(step_s)
        if math.isfinite(step_s):
            self._setting.start_saving(account, step_s, policy=self._policy)

    def _step_s(self) -> float:
        """Of the slowest pipeline."""
        if not self._num_pipelines:
            return math.inf
        microbatches = -(-self._job.batch_microbatches // self._num_pipelines)
        patterns = {frozenset[int](), *self._gone.values()}
        return max(self._pipeline_s(microbatches, stages) for stages in patterns)

    def _pipeline_s(self, microbatches: int, gone: frozenset[int]) -> float:
        key = (microbatches, gone)
        if key not in self._steps_s:
            stages = list(self._durations.stages)
            for stage in gone:
                before = (stage - 1) % len(stages)
                stages[before] = _sum(stages[before], self._durations.stages[stage])
            left = tuple(stage for number, stage in enumerate(stages) if number not in gone)
            shorter = replace(self._durations, stages=left)
            slowdown = self._setting.constants.bamboo_slowdown
            self._steps_s[key] = slowdown * one_f_one_b_s(shorter, microbatches)
        return self._steps_s[key]


def _sum(one: StageDurations, other: StageDurations) -> StageDurations:
    return StageDurations(
        forward=one.forward + other.forward,
        input_gradient=one.input_gradient + other.input_gradient,
        weight_gradient=one.weight_gradient + other.weight_gradient,
    )
