"""Where a worker's orders come from: a coordinator, or nobody but itself.

`Run` knows only the `Guide`, so training alone and training in a job are the same code.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from everstep.comm.lifetime import Lifetime
from everstep.core.ids import WorkerId
from everstep.execute.executor import StepReport
from everstep.execute.timing import (
    FORWARD,
    INPUT_GRADIENT,
    OPTIMIZER,
    PEERS,
    REDUCTION,
    WEIGHT_GRADIENT,
    Profiler,
)
from everstep.membership import messages as m
from everstep.membership.client import Client
from everstep.membership.recovering import StateCopy
from everstep.schedule.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What to do in one generation."""

    generation: int
    step: int
    """The next to run."""

    actions: tuple[Action, ...]
    addresses: dict[WorkerId, str]
    """The data addresses of all live workers."""

    lifetime: Lifetime
    meeting: m.Meeting | None = None
    profile_steps: int = 0
    redo: m.RollBack | None = None
    undo: bool = False
    copies: tuple[StateCopy, ...] = ()
    operations: int = 0
    """Completed by everybody; later ones are to be served again."""

    result: m.StepResult | None = None
    """Of the step before `step`, for those who get it by copy."""

    @property
    def members(self) -> tuple[WorkerId, ...]:
        return tuple(sorted(self.addresses))

    def members_of(self, stage: int) -> tuple[WorkerId, ...]:
        return tuple(worker for worker in self.members if worker.stage == stage)


class Guide(Protocol):
    def next_orders(self) -> Orders:
        """Waits for the next generation."""

    def wait_watermark(self, step: int) -> None: ...

    def take_replan(self, step: int) -> tuple[Action, ...] | None:
        """The actions from `step` on, when they changed."""

    def is_boundary(self, step: int) -> bool:
        """Whether the generation ends by plan after `step`."""

    def report_step(self, report: StepReport) -> None: ...

    def report_profile(self, profiler: Profiler) -> None: ...

    def report_halted(self, finished_step: int | None, *, operations: int) -> None: ...

    def report_broken(self, cause: str) -> None: ...

    def wait_halt(self, lifetime: Lifetime, *, timeout_s: float) -> None:
        """Returns when `lifetime` has ended, or the word that ends it should have come by now."""

    def report_resumed(self, *, connect_s: float, copy_s: float) -> None: ...

    def report_copied(self, step: int) -> None: ...

    def report_finished(self) -> None: ...


class CoordinatorGuide:
    """Orders come from the coordinator, through the worker's client."""

    def __init__(self, client: Client, *, me: WorkerId) -> None:
        self._client = client
        self._me = me
        self._lock = threading.Lock()
        self._generation = 0
        self._halted_generation = 0
        self._lifetime: Lifetime | None = None
        client.on_halt = self._on_halt

    def next_orders(self) -> Orders:
        resume = self._client.wait_resume(after_generation=self._generation)
        lifetime = Lifetime(resume.generation)
        with self._lock:
            self._generation, self._lifetime = resume.generation, lifetime
            is_over = self._halted_generation >= resume.generation
        if is_over:
            lifetime.end()
        return Orders(
            generation=resume.generation,
            step=resume.step,
            actions=m.unpack_actions(resume.actions, worker=self._me),
            addresses={WorkerId(x.replica, x.stage): x.data_address for x in resume.members},
            lifetime=lifetime,
            meeting=resume.meeting,
            profile_steps=resume.profile_steps,
            redo=resume.redo,
            undo=resume.undo,
            copies=tuple(
                StateCopy(WorkerId(copy.source, copy.stage), WorkerId(copy.target, copy.stage))
                for copy in resume.copies
            ),
            operations=resume.operations,
            result=resume.result,
        )

    def _on_halt(self, halt: m.Halt) -> None:
        """On the link's thread: frees whatever the training thread is blocked in."""
        with self._lock:
            self._halted_generation = halt.generation
            lifetime = self._lifetime
        if lifetime is not None and lifetime.generation <= halt.generation:
            lifetime.end()

    def wait_watermark(self, step: int) -> None:
        self._client.wait_watermark(step)

    def is_boundary(self, step: int) -> bool:
        return self._client.is_boundary(step)

    def take_replan(self, step: int) -> tuple[Action, ...] | None:
        replan = self._client.take_replan(step)
        return None if replan is None else m.unpack_actions(replan.actions, worker=self._me)

    def report_step(self, report: StepReport) -> None:
        self._client.send(
            m.StepDone(
                generation=self._generation,
                step=report.step,
                seconds=report.seconds,
                loss=report.loss,
                metrics=report.metrics,
                norm_squared=report.norm_squared,
                breakdown=report.times.totals(),
            )
        )

    def report_profile(self, profiler: Profiler) -> None:
        durations = m.StageProfile(
            forward=profiler.typical_s(FORWARD),
            input_gradient=profiler.typical_s(INPUT_GRADIENT),
            weight_gradient=profiler.typical_s(WEIGHT_GRADIENT),
            # What a receive costs when the message is already there; waiting for peers is not it.
            transfer=profiler.shortest_s(PEERS),
            reduction=profiler.shortest_s(REDUCTION),
            optimizer=profiler.typical_s(OPTIMIZER),
        )
        self._client.send(m.Profile(self._generation, durations))

    def report_halted(self, finished_step: int | None, *, operations: int) -> None:
        self._client.send(m.Halted(self._generation, finished_step, operations))

    def report_broken(self, cause: str) -> None:
        self._client.send(m.Broken(self._generation, cause))

    def wait_halt(self, lifetime: Lifetime, *, timeout_s: float) -> None:
        lifetime.pause(timeout_s)
        while self._client.is_away and not lifetime.has_ended:
            lifetime.pause(timeout_s)  # nobody could have said it

    def report_resumed(self, *, connect_s: float, copy_s: float) -> None:
        self._client.send(m.Resumed(self._generation, connect_s, copy_s))

    def report_copied(self, step: int) -> None:
        self._client.send(m.Copied(self._generation, step))

    def report_finished(self) -> None:
        self._client.send(m.Finished())


class SoloGuide:
    """One worker without a coordinator: one generation that never ends."""

    def __init__(self, actions: tuple[Action, ...]) -> None:
        self._actions = actions

    def next_orders(self) -> Orders:
        return Orders(
            generation=1,
            step=0,
            actions=self._actions,
            addresses={WorkerId(0, 0): ""},
            lifetime=Lifetime(1),
        )

    def wait_watermark(self, step: int) -> None:
        """There is nobody to wait for."""

    def is_boundary(self, step: int) -> bool:
        del step
        return False

    def take_replan(self, step: int) -> tuple[Action, ...] | None:
        del step
        return None

    def report_step(self, report: StepReport) -> None:
        """There is nobody to tell."""

    def report_profile(self, profiler: Profiler) -> None:
        """There is nobody to tell."""

    def report_halted(self, finished_step: int | None, *, operations: int) -> None:
        """There is nobody to tell."""

    def report_broken(self, cause: str) -> None:
        """There is nobody to tell."""

    def wait_halt(self, lifetime: Lifetime, *, timeout_s: float) -> None:
        """Nobody will say it."""

    def report_resumed(self, *, connect_s: float, copy_s: float) -> None:
        """There is nobody to tell."""

    def report_copied(self, step: int) -> None:
        """There is nobody to tell."""

    def report_finished(self) -> None:
        """There is nobody to tell."""
