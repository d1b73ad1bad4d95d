"""everstep, and any other that re-routes: the planner's period for the losses as they lie.

A loss      noticed, everybody halts, `decide_recovery` (the live one) says how all stages get to
            one step, groups are formed, the interrupted step is run again.
A join      takes its own place, or the vacancy of the hardest-hit stage, at a step boundary chosen
            ahead; its state is copied from a peer.
Moving      `decide_normalization` (the live one) weighs moving workers between stages.
No peer     a stage without a live worker is replayed from its checkpoint and its neighbours' logs,
            where there are logs; else all that are left are spread over the stages again, start
            anew and load the newest checkpoint. Below one worker per stage they wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from functools import partial

from everstep.checkpoint.objectives import LostProgress
from everstep.core.ids import WorkerId
from everstep.membership.recovering import Hopeless, Recovery, Survivor
from everstep.membership.roster import Shape
from everstep.recovery.decide import decide_recovery
from everstep.schedule.normalize import Normalize, Stay, decide_normalization
from everstep.schedule.problem import Problem, Variant
from everstep.sim.account import Account, Cause
from everstep.sim.logs import Groups, logged_fraction, replay_step_s
from everstep.sim.memory import does_not_fit
from everstep.sim.periods import Losses, Periods, counts, places
from everstep.sim.setting import Setting
from everstep.sim.systems.grid import Grid


class Rerouting:
    def __init__(
        self, setting: Setting, *, name: str, variant: Variant, is_normalizing: bool
    ) -> None:
        job = setting.job
        self.name = name
        self.does_not_fit = does_not_fit(job)
        self._setting = setting
        self._policy = setting.policy or LostProgress()
        self._job = job
        self._shape = Shape(job.replicas, job.stages)
        self.periods = Periods(job.problem(variant), budget=setting.plan_budget)
        self._phases = self.periods.finish_phases()
        self._is_normalizing = is_normalizing
        self._groups = Groups.of(job, setting.log_groups) if setting.log_groups else None
        self._lost_s = [-math.inf] * job.stages
        """When each stage has last lost a worker, and its logs with it."""

        self.fault_free_step_s = self._step_s((0,) * job.stages)
        self._weighed: dict[Losses, Normalize | Stay] = {}
        self._grid = Grid(job, num_workers=setting.num_workers)
        self.is_stopped = False

    # The loop's calls.

    def begin(self, lost: list[int], account: Account) -> None:
        """Who is not there yet never had a place; the others fill the grid as well as they can."""
        self._grid.lose(lost)
        self._grid.spread()
        self._go_on(account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        hit = self._grid.lose(lost)
        self._note_lost_logs(hit, account)
        if self.is_stopped:
            self._grid.note_up(joined)
            self._restore(account, rung=None)
        elif hit:
            self._recover(account)
        if not self.is_stopped:
            self._admit(joined, account)
        if not self.is_stopped:
            self._normalize(account)
        self._go_on(account)

    # Losses.

    def _recover(self, account: Account) -> None:
        decision = decide_recovery(
            self._survivors(account), shape=self._shape, open_step=math.floor(account.steps)
        )
        if isinstance(decision, Hopeless):
            if self._replay(account):
                return
            account.roll_back()
            self._restore(account, rung="checkpoint")
            return
        self._note(decision, account)
        account.drop_partial_step()
        undo_s = self._job.update_s(self._setting.stage_bytes) if decision.undo else 0.0
        account.pause(
            (Cause.NOTICING, self._setting.noticing_s),
            (Cause.GROUPS, self._forming_s()),
            (Cause.UNDO, undo_s),
            (Cause.FILLING, self._filling_s()),
        )

    def _replay(self, account: Account) -> bool:
        """From logs, if they are whole and there is a worker for every stage."""
        grid, job = self._grid, self._job
        if self._groups is None or grid.num_live < job.stages:
            return False
        gone = [stage for stage, live in enumerate(grid.live_per_stage) if not live]
        since_s = account.newest_durable_s
        stages = self._groups.replayed(gone, has_hole=lambda stage: self._lost_s[stage] >= since_s)
        if len(stages) == job.stages:
            return False
        self._note_lost_logs(grid.fill_empty_stages(), account)
        step_s = replay_step_s(
            job,
            stages,
            num_live=grid.num_live,
            num_seated=sum(grid.live_per_stage[stage] for stage in stages),
            efficiency=self._setting.constants.replay_efficiency,
        )
        account.rungs["replay"] += 1
        account.drop_partial_step()
        account.pause(
            (Cause.NOTICING, self._setting.noticing_s),
            (Cause.GROUPS, self._forming_s()),
            (Cause.LOADING, self._setting.load_s),
            (Cause.REPLAY, account.steps_since_durable * step_s),
            (Cause.FILLING, self._filling_s()),
        )
        return True

    def _note_lost_logs(self, stages: list[int], account: Account) -> None:
        """A log dies with the process that kept it, whether it was lost or moved."""
        for stage in stages:
            self._lost_s[stage] = account.now_s

    def _survivors(self, account: Account) -> list[Survivor]:
        """One for each stage stands for all of its live workers: they finish their steps together,
        so they are alike to the decision (a property test says so)."""
        open_step = math.floor(account.steps)
        phase = account.steps - open_step
        return [
            Survivor(
                place=WorkerId(0, stage),
                finished_step=open_step if phase >= ends_at else open_step - 1,
            )
            for stage, ends_at in enumerate(self._phases)
            if self._grid.losses[stage] < self._job.replicas
        ]

    def _note(self, decision: Recovery, account: Account) -> None:
        """A recovery is counted once, by the deepest rung that a stage needed."""
        order = [rung for rung in decision.rungs if rung != "continue"]
        account.rungs[str(order[0]) if order else "continue"] += 1

    def _restore(self, account: Account, *, rung: str | None) -> None:
        """From the newest checkpoint, with all that are left spread over the stages anew."""
        was_stopped = self.is_stopped
        self._grid.spread()
        self.is_stopped = 0 in self._grid.live_per_stage
        if rung is not None:
            account.rungs[rung] += 1
        if not self.is_stopped:
            noticing_s = 0.0 if was_stopped else self._setting.noticing_s
            account.pause(
                (Cause.NOTICING, noticing_s),
                (Cause.RESTART, self._setting.constants.everstep_restart_s),
                (Cause.GROUPS, self._forming_s()),
                (Cause.LOADING, self._setting.load_s),
                (Cause.FILLING, self._filling_s()),
            )

    # Joins and moves.

    def _admit(self, joined: list[int], account: Account) -> None:
        before_s = self.periods.period(self._losses)
        if not self._grid.admit(joined):
            return
        account.rungs["replica"] += 1
        gain_s = before_s - self.periods.period(self._losses)
        account.pause(
            (Cause.BOUNDARY, max(0.0, gain_s) * self._setting.constants.join_boundary_steps),
            (Cause.GROUPS, self._forming_s()),
            (Cause.COPY, self._setting.copy_s),
            (Cause.FILLING, self._filling_s()),
        )

    def _normalize(self, account: Account) -> None:
        if not self._is_normalizing or not self.can_lie_better():
            return
        decision = self._weigh()
        if isinstance(decision, Stay):
            return
        for move in decision.moves:
            self._grid.move(move.donor.stage, move.vacancy.stage)
        self._note_lost_logs([move.donor.stage for move in decision.moves], account)
        account.rungs["move"] += 1
        account.pause(*self._moving())

    def _moving(self) -> tuple[tuple[Cause, float], ...]:
        """Generations change twice: the worker leaves its place, and comes in at the other. Weighed
        and charged alike, so the pipelines are filled as if nobody were lost."""
        return (
            (Cause.GROUPS, 2 * self._forming_s()),
            (Cause.COPY, self._setting.copy_s),
            (Cause.FILLING, 2 * self.periods.filling_s((0,) * self._job.stages)),
        )

    def _weigh(self) -> Normalize | Stay:
        """The live decision for as many losses in each stage; only stages matter to it."""
        losses = self._losses
        if losses not in self._weighed:
            self._weighed[losses] = decide_normalization(
                replace(self.periods.problem, lost=places(losses)),
                copy=sum(seconds for _, seconds in self._moving()),
                horizon=self._setting.failures.mean_outage_s,
                period_of=self._period_of,
            )
        return self._weighed[losses]

    def _period_of(self, problem: Problem) -> float:
        return self.periods.period(counts(problem.lost, problem.stages))

    def _step_s(self, losses: Losses) -> float:
        """The period, and what logging adds to it."""
        if self._groups is None:
            return self.periods.period(losses)
        share = self._setting.constants.logging_fraction * logged_fraction(self._groups, self._job)
        return self.periods.period(losses) * (1 + share)

    def can_lie_better(self) -> bool:
        """Whether another distribution of as many losses has a lower bound. If none has, the live
        decision is to stay, so it need not be asked (a property test says so)."""
        current, wanted = self.periods.bound(self._losses), sum(self._losses)
        stages = range(self._job.stages)
        if any(self.periods.stage_bound(stage, 0) >= current for stage in stages):
            return False
        room = 0
        for stage in stages:
            most = min(self._job.replicas - 1, wanted - room)
            bound = partial(self.periods.stage_bound, stage)
            room += bisect_left(range(1, most + 1), current, key=bound)
        return room >= wanted

    # Going on.

    def _go_on(self, account: Account) -> None:
        if 0 in self._grid.live_per_stage:
            self.is_stopped = True
            account.run_at(math.inf)
            return
        self.is_stopped = False
        step_s = self._step_s(self._losses)
        account.run_at(step_s)
        self._setting.start_saving(account, step_s, policy=self._policy)

    @property
    def _losses(self) -> Losses:
        return tuple(self._grid.losses)

    def _filling_s(self) -> float:
        return self.periods.filling_s(self._losses)

    def _forming_s(self) -> float:
        return self._setting.constants.forming_s(self._grid.num_live)


def everstep(setting: Setting) -> Rerouting:
    return Rerouting(
        setting, name="everstep", variant=Variant.DECOUPLED_STAGGERED, is_normalizing=True
    )
