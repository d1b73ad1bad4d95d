"""everstep, and any other that re-routes: the planner's period for the losses as they lie.

A loss      noticed, everybody halts, `decide_recovery` (the live one) says how all stages get to
            one step, groups are formed, the interrupted step is run again.
A join      takes its own place, or the vacancy of the hardest-hit stage, at a step boundary chosen
            ahead; its state is copied from a peer.
Moving      `decide_normalization` (the live one) weighs moving workers between stages.
No peer     a stage without a live worker: all that are left are spread over the stages again and
            load the newest checkpoint; below one worker per stage they wait.

What the live coordinator does not do yet is in docs/simulator.md.
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
from everstep.sim.memory import does_not_fit
from everstep.sim.periods import Losses, Periods, counts, places
from everstep.sim.setting import Setting

OUTSIDE = -1
"""The place of a worker that is lost or waits."""


class Rerouting:
    """Places are numbered as in the live system: replica * stages + stage."""

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
        self.fault_free_step_s = self.periods.fault_free.period
        self._phases = self.periods.finish_phases()
        self._is_normalizing = is_normalizing
        self._weighed: dict[Losses, Normalize | Stay] = {}
        self._place_of = [
            number if number < job.num_workers else OUTSIDE for number in range(setting.num_workers)
        ]
        self._is_up = [True] * setting.num_workers
        self._worker_at: list[int] = list(range(job.num_workers))
        self._losses = [0] * job.stages
        self.is_stopped = False

    # The loop's calls.

    def begin(self, lost: list[int], account: Account) -> None:
        """Who is not there yet never had a place; the others fill the grid as well as they can."""
        for worker in lost:
            self._is_up[worker] = False
        self._spread()
        self._go_on(account)

    def change(self, lost: list[int], joined: list[int], account: Account) -> None:
        for worker in lost:
            self._is_up[worker] = False
        vacated = [self._vacate(worker) for worker in lost if self._place_of[worker] != OUTSIDE]
        for worker in joined:
            self._is_up[worker] = True
        if self.is_stopped:
            self._restore(account, rung=None)
        elif vacated:
            self._recover(account)
        if not self.is_stopped:
            self._admit(joined + self._waiting(), account)
        if not self.is_stopped:
            self._normalize(account)
        self._go_on(account)

    # Losses.

    def _recover(self, account: Account) -> None:
        decision = decide_recovery(
            self._survivors(account), shape=self._shape, open_step=math.floor(account.steps)
        )
        if isinstance(decision, Hopeless):
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
            (Cause.FILLING, self.periods.filling_s),
        )

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
            if self._losses[stage] < self._job.replicas
        ]

    def _note(self, decision: Recovery, account: Account) -> None:
        """A recovery is counted once, by the deepest rung that a stage needed."""
        order = [rung for rung in decision.rungs if rung != "continue"]
        account.rungs[str(order[0]) if order else "continue"] += 1

    def _restore(self, account: Account, *, rung: str | None) -> None:
        """From the newest checkpoint, with all that are left spread over the stages anew."""
        was_stopped = self.is_stopped
        self._spread()
        self.is_stopped = 0 in self._live_per_stage()
        if rung is not None:
            account.rungs[rung] += 1
        if not self.is_stopped:
            noticing_s = 0.0 if was_stopped else self._setting.noticing_s
            account.pause(
                (Cause.NOTICING, noticing_s),
                (Cause.GROUPS, self._forming_s()),
                (Cause.LOADING, self._setting.load_s),
                (Cause.FILLING, self.periods.filling_s),
            )

    # Joins and moves.

    def _waiting(self) -> list[int]:
        """Workers beyond the grid, who take the places of the lost."""
        spare = range(self._job.num_workers, self._setting.num_workers)
        return [w for w in spare if self._is_up[w] and self._place_of[w] == OUTSIDE]

    def _admit(self, joined: list[int], account: Account) -> None:
        if not joined or not any(self._losses):
            return
        before_s = self.periods.period(tuple(self._losses))
        seated = [w for w in joined if self._place_of[w] == OUTSIDE and self._seat(w)]
        if not seated:
            return
        account.rungs["replica"] += 1
        gain_s = before_s - self.periods.period(tuple(self._losses))
        account.pause(
            (Cause.BOUNDARY, max(0.0, gain_s) * self._setting.constants.join_boundary_steps),
            (Cause.GROUPS, self._forming_s()),
            (Cause.COPY, self._setting.copy_s),
            (Cause.FILLING, self.periods.filling_s),
        )

    def _normalize(self, account: Account) -> None:
        if not self._is_normalizing or not self.can_lie_better():
            return
        decision = self._weigh()
        if isinstance(decision, Stay):
            return
        for move in decision.moves:
            self._losses[move.donor.stage] += 1
            self._losses[move.vacancy.stage] -= 1
        self._relocate(decision)
        account.rungs["move"] += 1
        account.pause(
            (Cause.GROUPS, self._forming_s()),
            (Cause.COPY, self._setting.copy_s),
            (Cause.FILLING, self.periods.filling_s),
        )

    def _weigh(self) -> Normalize | Stay:
        """The live decision for as many losses in each stage; only stages matter to it."""
        losses = tuple(self._losses)
        if losses not in self._weighed:
            self._weighed[losses] = decide_normalization(
                replace(self.periods.problem, lost=places(losses)),
                copy=self._setting.copy_s + self._forming_s(),
                horizon=self._setting.failures.mean_outage_s,
                period_of=self._period_of,
            )
        return self._weighed[losses]

    def _period_of(self, problem: Problem) -> float:
        return self.periods.period(counts(problem.lost, problem.stages))

    def can_lie_better(self) -> bool:
        """Whether another distribution of as many losses has a lower bound. If none has, the live
        decision is to stay, so it need not be asked (a property test says so)."""
        current, wanted = self.periods.bound(tuple(self._losses)), sum(self._losses)
        stages = range(self._job.stages)
        if any(self.periods.stage_bound(stage, 0) >= current for stage in stages):
            return False
        room = 0
        for stage in stages:
            most = min(self._job.replicas - 1, wanted - room)
            bound = partial(self.periods.stage_bound, stage)
            room += bisect_left(range(1, most + 1), current, key=bound)
        return room >= wanted

    # The grid.

    def _go_on(self, account: Account) -> None:
        if 0 in self._live_per_stage():
            self.is_stopped = True
            account.run_at(math.inf)
            return
        self.is_stopped = False
        step_s = self.periods.period(tuple(self._losses))
        account.run_at(step_s)
        self._setting.start_saving(account, step_s, policy=self._policy)

    def _forming_s(self) -> float:
        return self._setting.constants.forming_s(self._job.num_workers - sum(self._losses))

    def _live_per_stage(self) -> list[int]:
        return [self._job.replicas - lost for lost in self._losses]

    def _vacate(self, worker: int) -> int:
        place = self._place_of[worker]
        self._place_of[worker] = OUTSIDE
        self._worker_at[place] = OUTSIDE
        self._losses[place % self._job.stages] += 1
        return place

    def _sit(self, worker: int, place: int) -> None:
        self._place_of[worker] = place
        self._worker_at[place] = worker
        self._losses[place % self._job.stages] -= 1

    def _seat(self, worker: int) -> bool:
        """At its own place, or where it helps most; False when all places are taken."""
        if not any(self._losses):
            return False
        is_own_free = worker < self._job.num_workers and self._worker_at[worker] == OUTSIDE
        self._sit(worker, worker if is_own_free else self._best_vacancy())
        return True

    def _best_vacancy(self) -> int:
        stage = self._losses.index(max(self._losses))
        column = range(stage, self._job.num_workers, self._job.stages)
        return next(place for place in column if self._worker_at[place] == OUTSIDE)

    def _relocate(self, decision: Normalize) -> None:
        """The decision may stem from other places with the same counts: only stages matter."""
        stages = self._job.stages
        for move in decision.moves:
            donors = range(move.donor.stage, self._job.num_workers, stages)
            vacancies = range(move.vacancy.stage, self._job.num_workers, stages)
            donor = next(p for p in donors if self._worker_at[p] != OUTSIDE)
            vacancy = next(p for p in vacancies if self._worker_at[p] == OUTSIDE)
            worker = self._worker_at[donor]
            self._worker_at[donor] = OUTSIDE
            self._worker_at[vacancy] = worker
            self._place_of[worker] = vacancy

    def _spread(self) -> None:
        """All live workers over the stages: who can keeps its own place, the others fill up."""
        job = self._job
        live = [worker for worker, is_up in enumerate(self._is_up) if is_up]
        self._place_of = [OUTSIDE] * len(self._is_up)
        self._worker_at = [OUTSIDE] * job.num_workers
        self._losses = [job.replicas] * job.stages
        for worker in live:
            if worker < job.num_workers:
                self._sit(worker, worker)
        for worker in live:
            if worker >= job.num_workers and any(self._losses):
                self._sit(worker, self._best_vacancy())
        self._even_out(len(live))

    def _even_out(self, num_live: int) -> None:
        """Empty stages get workers from the fullest, when there are enough for all."""
        stages = self._job.stages
        while num_live >= stages and max(self._losses) == self._job.replicas:
            fullest = self._losses.index(min(self._losses))
            column = range(fullest, self._job.num_workers, stages)
            donor = next(p for p in column if self._worker_at[p] != OUTSIDE)
            worker = self._worker_at[donor]
            self._vacate(worker)
            self._sit(worker, self._best_vacancy())


def everstep(setting: Setting) -> Rerouting:
    return Rerouting(
        setting, name="everstep", variant=Variant.DECOUPLED_STAGGERED, is_normalizing=True
    )
