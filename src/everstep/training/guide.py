"""Where a worker's orders come from: a coordinator, or nobody but itself.

`Run` knows only the `Guide`, so training alone and training in a job are the same code.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from everstep.comm.lifetime import Lifetime
from everstep.core.ids import WorkerId
from everstep.execute.executor import StepReport
from everstep.execute.replay import ReplayedStep
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
from everstep.membership.action_rows import unpack_actions
from everstep.membership.client import Client
from everstep.membership.facts import LogDirection, StageProfile
from everstep.membership.recovering import StateCopy
from everstep.schedule.actions import Action
from everstep.training.orders import Orders, Stand

SentBytes = Mapping[LogDirection, int]
"""That one step sends to the next stage and to the one before."""


class Guide(Protocol):
    def next_orders(self) -> Orders:
        """Waits for the next generation."""

    def wait_watermark(self, step: int) -> None: ...

    def wait_halt(self, *, timeout_s: float) -> None:
        """Returns when the generation is over; raises when there is none to wait for."""

    def take_replan(self, step: int) -> tuple[Action, ...] | None:
        """The actions from `step` on, when they changed."""

    def is_boundary(self, step: int) -> bool:
        """Whether the generation ends by plan after `step`."""

    def take_save(self, step: int) -> bool:
        """Whether a checkpoint is to be taken after `step`; says so once."""

    def take_failed_saves(self) -> list[int]:
        """Steps whose checkpoints have failed on some stage; says so once."""

    def want_save(self) -> None:
        """A checkpoint is due."""

    def report_saved(self, event: Mapping[str, object]) -> None:
        """What became of this stage's part of one: an event of the engine's."""

    def report_step(self, report: StepReport) -> None: ...

    def report_profile(self, profiler: Profiler, *, sent: SentBytes) -> None: ...

    def report_halted(self, stand: Stand) -> None: ...

    def report_broken(self, cause: str) -> None: ...

    def report_resumed(self, *, connect_s: float, copy_s: float) -> None: ...

    def report_copied(self, step: int) -> None: ...

    def report_replayed(
        self, step: int, result: ReplayedStep, *, norm_squared: float | None
    ) -> None: ...

    def report_replay_failed(self, why: str) -> None: ...

    def needs_no_log(self) -> tuple[int, tuple[int, ...]]:
        """Up to which step, and at which boundaries."""

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
            actions=unpack_actions(resume.actions, worker=self._me),
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
            is_copied_step_open=resume.watermark < resume.step - 1,
            operations=resume.operations,
            result=resume.result,
            restore=resume.restore,
            replays=resume.replays,
            unlogged=resume.unlogged,
            save_name=_save_name(resume),
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

    def wait_halt(self, *, timeout_s: float) -> None:
        self._client.wait_halt(self._generation, timeout_s=timeout_s)

    def is_boundary(self, step: int) -> bool:
        return self._client.is_boundary(step)

    def take_replan(self, step: int) -> tuple[Action, ...] | None:
        replan = self._client.take_replan(step)
        return None if replan is None else unpack_actions(replan.actions, worker=self._me)

    def take_save(self, step: int) -> bool:
        return self._client.take_save(step)

    def take_failed_saves(self) -> list[int]:
        return self._client.take_failed_saves()

    def want_save(self) -> None:
        self._client.send(m.SaveWanted(self._generation))

    def report_saved(self, event: Mapping[str, object]) -> None:
        facts: dict[str, Any] = dict(event)
        if facts["event"] == "checkpoint_failed":
            self._client.send(m.Saved(step=facts["step"], why_not=facts["why"]))
            return
        self._client.send(
            m.Saved(
                step=facts["step"],
                stall_s=facts["stall_seconds"],
                durable_s=facts["durable_seconds"],
                size_bytes=facts["bytes"],
            )
        )

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

    def report_profile(self, profiler: Profiler, *, sent: SentBytes) -> None:
        durations = StageProfile(
            forward=profiler.typical_s(FORWARD),
            input_gradient=profiler.typical_s(INPUT_GRADIENT),
            weight_gradient=profiler.typical_s(WEIGHT_GRADIENT),
            # What a receive costs when the message is already there; waiting for peers is not it.
            transfer=profiler.shortest_s(PEERS),
            reduction=profiler.shortest_s(REDUCTION),
            optimizer=profiler.typical_s(OPTIMIZER),
            sent_forward=sent.get(LogDirection.FORWARD, 0),
            sent_backward=sent.get(LogDirection.BACKWARD, 0),
        )
        self._client.send(m.Profile(self._generation, durations))

    def report_halted(self, stand: Stand) -> None:
        self._client.send(
            m.Halted(
                self._generation,
                stand.finished_step,
                stand.operations,
                stand.is_operating,
                stand.logged,
            )
        )

    def report_broken(self, cause: str) -> None:
        self._client.send(m.Broken(self._generation, cause))

    def report_resumed(self, *, connect_s: float, copy_s: float) -> None:
        self._client.send(m.Resumed(self._generation, connect_s, copy_s))

    def report_copied(self, step: int) -> None:
        self._client.send(m.Copied(self._generation, step))

    def report_replayed(
        self, step: int, result: ReplayedStep, *, norm_squared: float | None
    ) -> None:
        self._client.send(
            m.Replayed(
                generation=self._generation,
                step=step,
                loss=result.loss,
                metrics=result.metrics,
                norm_squared=norm_squared,
            )
        )

    def report_replay_failed(self, why: str) -> None:
        self._client.send(m.ReplayFailed(self._generation, why))

    def needs_no_log(self) -> tuple[int, tuple[int, ...]]:
        return self._client.durable_step, self._client.unlogged

    def report_finished(self) -> None:
        self._client.send(m.Finished())


class SoloGuide:
    """One worker without a coordinator: one generation that never ends."""

    def __init__(self, actions: tuple[Action, ...], *, restore: int | None = None) -> None:
        self._actions = actions
        self._restore = restore
        self._is_save_due = False

    def next_orders(self) -> Orders:
        return Orders(
            generation=1,
            step=0 if self._restore is None else self._restore + 1,
            actions=self._actions,
            addresses={WorkerId(0, 0): ""},
            lifetime=Lifetime(1),
            restore=self._restore,
        )

    def take_save(self, step: int) -> bool:
        del step
        is_due, self._is_save_due = self._is_save_due, False
        return is_due

    def take_failed_saves(self) -> list[int]:
        return []

    def want_save(self) -> None:
        self._is_save_due = True

    def report_saved(self, event: Mapping[str, object]) -> None:
        """There is nobody to tell; the engine has logged it."""

    def wait_watermark(self, step: int) -> None:
        """There is nobody to wait for."""

    def wait_halt(self, *, timeout_s: float) -> None:
        """There is nobody to wait for."""

    def is_boundary(self, step: int) -> bool:
        del step
        return False

    def take_replan(self, step: int) -> tuple[Action, ...] | None:
        del step
        return None

    def report_step(self, report: StepReport) -> None:
        """There is nobody to tell."""

    def report_profile(self, profiler: Profiler, *, sent: SentBytes) -> None:
        """There is nobody to tell."""

    def report_halted(self, stand: Stand) -> None:
        """There is nobody to tell."""

    def report_replayed(
        self, step: int, result: ReplayedStep, *, norm_squared: float | None
    ) -> None:
        """There is nobody to tell."""

    def report_replay_failed(self, why: str) -> None:
        """There is nobody to tell."""

    def needs_no_log(self) -> tuple[int, tuple[int, ...]]:
        return -1, ()

    def report_broken(self, cause: str) -> None:
        """There is nobody to tell."""

    def report_resumed(self, *, connect_s: float, copy_s: float) -> None:
        """There is nobody to tell."""

    def report_copied(self, step: int) -> None:
        """There is nobody to tell."""

    def report_finished(self) -> None:
        """There is nobody to tell."""


def _save_name(resume: m.Resume) -> str:
    uids = sorted(member.uid for member in resume.members)
    digest = hashlib.sha256("\n".join(uids).encode()).hexdigest()
    return f"g{resume.generation}-{digest[:12]}"
