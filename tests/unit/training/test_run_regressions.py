"""Bugs of the run that were found the hard way, on one worker with a scripted coordinator."""

from __future__ import annotations

from dataclasses import replace

import torch

import everstep
from everstep.comm.lifetime import Lifetime
from everstep.core.clock import SystemClock
from everstep.core.ids import WorkerId
from everstep.schedule.durations import Durations
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem
from everstep.training.guide import SoloGuide
from everstep.training.holding import hold
from everstep.training.orders import Orders, Stand
from everstep.training.run import Run
from everstep.training.wiring import _Alone

STEPS = 6


class Numbers:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), index / 12), torch.tensor([1.0])


class BoundaryGuide(SoloGuide):
    """Ends the first generation after a step; the orders of the second are given."""

    def __init__(self, *, after_step: int, is_undone: bool) -> None:
        problem = Problem(replicas=1, stages=1, microbatches=2, durations=Durations.uniform(1))
        super().__init__(plan(problem).actions[WorkerId(0, 0)])
        self._after_step = after_step
        self._is_undone = is_undone
        self._generation = 0
        self.reported: list[int] = []
        self.halted: list[tuple[int | None, int]] = []

    def next_orders(self) -> Orders:
        self._generation += 1
        first = super().next_orders()
        if self._generation == 1:
            return first
        step = self._after_step + (0 if self._is_undone else 1)
        lifetime = Lifetime(self._generation)
        return replace(
            first,
            generation=self._generation,
            step=step,
            undo=self._is_undone,
            lifetime=lifetime,
            operations=self.halted[-1][1],
        )

    def is_boundary(self, step: int) -> bool:
        return self._generation == 1 and step >= self._after_step

    def report_step(self, report: object) -> None:
        self.reported.append(report.step)  # type: ignore[attr-defined]

    def report_halted(self, stand: Stand) -> None:
        self.halted.append((stand.finished_step, stand.operations))


def run_with(guide: SoloGuide) -> Run:
    job = everstep.Job(
        model=lambda: torch.nn.Linear(3, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        dataset=Numbers(),
        batch_size=4,
        microbatches=2,
    )
    holding = hold(job, me=WorkerId(0, 0), replicas=1, num_stages=1)
    return Run(holding, guide, _Alone(holding.me), steps=STEPS, clock=SystemClock())


def test_a_step_taken_back_while_waiting_at_a_boundary_is_run_again() -> None:
    """A worker waited at a boundary; another stage lost its only worker that had finished the step,
    so the one that waited had to take it back.
    It went on with the step after, from the wrong state."""
    guide = BoundaryGuide(after_step=2, is_undone=True)
    steps = [step.index for step in run_with(guide)]
    assert steps == list(range(STEPS))
    assert guide.reported == [0, 1, 2, 2, 3, 4, 5]


def test_a_generation_ends_on_the_way_into_a_step_not_before_an_operation() -> None:
    """Workers left at a boundary before an evaluation; the new worker, whose script had not seen
    the step before, went on with the next step.
    The others waited for it in the evaluation."""
    guide = BoundaryGuide(after_step=2, is_undone=False)
    for step in run_with(guide):
        if step.index == 2:
            assert guide.halted == []
            break
    run = run_with(guide := BoundaryGuide(after_step=2, is_undone=False))
    for step in run:
        if step.index == 2:
            run.evaluate(Numbers())
            assert guide.halted == [], "it must take part in the evaluation first"
        elif step.index == 3:
            assert guide.halted == [(2, 1)]
