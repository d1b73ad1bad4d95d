"""What a worker has said and heard, in short: all that a new coordinator must be told again.

Pure, and made from nothing but the messages that went over the connection. Invariant: what it
greets with holds everything said before, so whatever was said while nobody listened is not lost.
"""

from __future__ import annotations

from everstep.membership import messages as m
from everstep.membership.facts import JobFacts, StageProfile
from everstep.membership.regrouping import as_report


class Memory:
    def __init__(self, hello: m.Hello) -> None:
        self._hello = hello
        self._welcome: m.Welcome | None = None
        self._job: JobFacts | None = None
        self._saved: int | None = None
        self._resume: m.Resume | None = None
        self._watermark = -1
        self._finished_step: int | None = None
        self._report: m.StepDone | None = None
        self._is_copying = False
        self._halted: m.Halted | None = None
        self._ending: str | None = None
        self._replanned_from: int | None = None
        self._is_measuring = False
        self._profile: StageProfile | None = None
        self._has_finished = False
        self._failed: m.Failed | None = None
        self._durable = -1

    @property
    def has_last_words(self) -> bool:
        """Something was said after which the process ends, so nobody else will tell it."""
        return self._has_finished or self._failed is not None

    def said(self, message: m.FromWorker) -> None:
        match message:
            case m.Ready(job, saved):
                self._job, self._saved = job, saved
            case m.StepDone():
                self._finished_step, self._report = message.step, message
            case m.Copied():
                self._copied(message)
            case m.Replayed():
                self._replayed(message)
            case m.Profile(_, durations):
                self._profile, self._is_measuring = durations, False
            case m.Halted():
                self._halted, self._finished_step = message, message.finished_step
            case m.Broken(_, cause):
                self._ending = cause
            case m.Finished():
                self._has_finished = True
            case m.Failed():
                self._failed = message
            case _:
                pass  # of no use to a coordinator that was not there

    def heard(self, message: m.ToWorker) -> None:
        match message:
            case m.Welcome():
                self._welcome = message
            case m.Resume():
                self._resumed(message)
            case m.Replan():
                self._replanned_from = message.from_step
            case m.Watermark():
                self._watermark = message.step
            case m.Boundary():
                self._ending = _ending_after(message.after_step)
            case m.Halt():
                self._ending = message.why
            case m.Durable(step):
                self._durable = step
            case m.LogLess():
                pass  # the next Resume says it again
            case m.Save() | m.SaveFailed() | m.Stop():
                pass  # a checkpoint that is not taken is asked for again

    def _resumed(self, resume: m.Resume) -> None:
        assert self._welcome is not None
        me = self._welcome.stage, self._welcome.replica
        self._is_copying = any((copy.stage, copy.target) == me for copy in resume.copies)
        self._is_copying |= any(me[::-1] in replay.rebuilt for replay in resume.replays)
        if self._report is not None and self._report.step >= resume.step:
            self._report = None  # that step is run again
        is_first = self._finished_step is None and not self._is_copying
        if resume.undo or is_first or resume.restore is not None:
            # As the run does it, first of all: a step is taken back, or a first state is the start.
            self._finished_step = resume.step - 1
        self._resume = resume
        self._durable = resume.durable
        self._watermark = resume.watermark
        self._halted = self._replanned_from = None
        self._ending = None if resume.boundary is None else _ending_after(resume.boundary)
        self._is_measuring = resume.profile_steps > 0
        self._has_finished = False

    def _copied(self, copied: m.Copied) -> None:
        assert self._resume is not None
        result = self._resume.result
        self._finished_step, self._is_copying = copied.step, False
        self._report = m.StepDone(
            generation=copied.generation,
            step=copied.step,
            seconds=0.0,
            loss=None if result is None else result.loss,
            metrics={} if result is None else result.metrics,
        )

    def _replayed(self, replayed: m.Replayed) -> None:
        self._finished_step, self._is_copying = replayed.step, False
        self._report = as_report(replayed)

    def greeting(self) -> list[m.FromWorker]:
        """Hello, until there is a place to come back to; then Rejoin."""
        first = self._hello if self._welcome is None else self._rejoin(self._welcome)
        return [first] if self._failed is None else [first, self._failed]

    def _rejoin(self, welcome: m.Welcome) -> m.Rejoin:
        resume = self._resume
        return m.Rejoin(
            hello=self._hello,
            replica=welcome.replica,
            stage=welcome.stage,
            job=self._job,
            generation=0 if resume is None else resume.generation,
            members=() if resume is None else resume.members,
            redo=None if resume is None else resume.redo,
            watermark=self._watermark,
            finished_step=self._finished_step,
            report=self._report,
            is_copying=self._is_copying,
            operations=0 if self._halted is None else self._halted.operations,
            ending=self._ending,
            is_halted=self._halted is not None,
            has_finished=self._has_finished,
            replanned_from=self._replanned_from,
            is_measuring=self._is_measuring,
            profile=self._profile,
            saved=self._saved,
            restore=None if resume is None else resume.restore,
            durable=self._durable,
            logged=() if self._halted is None else self._halted.logged,
            is_operating=False if self._halted is None else self._halted.is_operating,
        )


def _ending_after(step: int) -> str:
    return f"it was to end after step {step}"
