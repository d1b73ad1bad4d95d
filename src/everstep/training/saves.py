"""A run's checkpoints: the guide says when, the saver takes them, the guide is told what became.

Knows of no disk. Invariant: only a step that everybody has finished is saved.
"""

from __future__ import annotations

from contextlib import suppress

from everstep.core.errors import EverstepError
from everstep.core.ids import WorkerId
from everstep.execute.executor import StepReport
from everstep.training.guide import Guide
from everstep.training.orders import Orders
from everstep.training.saving import StageSaver


class Saves:
    def __init__(
        self, saver: StageSaver, guide: Guide, *, me: WorkerId, num_stages: int, steps: int
    ) -> None:
        self._saver = saver
        self._guide = guide
        self._me = me
        self._last_stage = num_stages - 1
        self._last_step = steps - 1
        self._is_lead = False
        self._is_reporter = False
        self._is_wanted = False
        self._name = ""

    def restore(self, step: int) -> None:
        self._saver.restore(step)

    def begin(self, orders: Orders) -> None:
        """Of a generation. What the last one was asked to save is forgotten."""
        self._is_lead = self._me == orders.lead(self._me.stage)
        self._is_reporter = self._me == orders.lead(self._last_stage)
        self._is_wanted = False
        self._name = orders.save_name
        self._saver.begin(run=orders.save_name)

    def stands(self, step: int) -> None:
        """Everybody has finished `step`: if it is to be saved, that begins now, and ends before the
        next update. The last one always is."""
        if not (self._guide.take_save(step) or step == self._last_step):
            return
        self._is_wanted = False
        self._saver.asked(step)
        if self._is_lead:
            self._saver.save(step, run=self._name)

    def before_update(self) -> None:
        """Returns when the state may be changed."""
        self._saver.before_update()

    def step_done(self, report: StepReport) -> None:
        self._tell()
        self._saver.step_done(report.step, report.loss)
        if self._is_lead:
            self._saver.prepare()
        is_due = self._is_reporter and self._saver.is_due(report.step)
        if is_due and not self._is_wanted:
            self._is_wanted = True
            self._guide.want_save()

    def close(self) -> None:
        """Waits until what was saved is on disk, and tells of it."""
        with suppress(EverstepError):  # the coordinator need not be there any more
            self._tell()
        events = self._saver.close()
        with suppress(EverstepError):
            for event in events:
                self._guide.report_saved(event)

    def leave(self) -> None:
        """Before the end of the job: without a wait."""
        self._saver.leave()

    def _tell(self) -> None:
        for step in self._guide.take_failed_saves():
            self._saver.abandon(step)
        for event in self._saver.events():
            self._guide.report_saved(event)
