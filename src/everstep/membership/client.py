"""The worker's side: what the coordinator has said so far, and waiting for what it says next.

The link's thread notes each message; the training thread waits on a condition. It knows nothing of
groups: `on_halt` is called on the link's thread, at once, for whoever must free blocked calls.
While the coordinator is away nothing here fails: what is said is kept, and waits go on.
Invariant: Resumes are taken one by one. The coordinator sends the next only after this worker's
Halted, so a Resume, and the redo in it, is never skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from everstep.core.errors import (
    CoordinatorLost,
    CoordinatorStopped,
    GenerationEnded,
    WaitTimedOut,
)
from everstep.membership import messages as m
from everstep.membership.codec import to_worker
from everstep.membership.link import Link, LinkSettings, open_link
from everstep.membership.memory import Memory

OnHalt = Callable[[m.Halt], None]

WATERMARK_WITHIN_S = 600.0
"""Longer than any step: the coordinator watches over stuck workers, this is the last resort."""

Awaited = TypeVar("Awaited")


class Client:
    """One worker's conversation with the coordinator."""

    def __init__(
        self, link: Link[m.ToWorker], *, hello: m.Hello, on_halt: OnHalt | None = None
    ) -> None:
        self.on_halt = on_halt
        self._link = link
        self._memory = Memory(hello)
        self._num_greetings = 0
        self._news = threading.Condition()
        self._welcome: m.Welcome | None = None
        self._resume: m.Resume | None = None
        self._halt: m.Halt | None = None
        self._replan: m.Replan | None = None
        self._boundary: int | None = None
        self._save: m.Save | None = None
        self._failed_saves: list[int] = []
        self._durable = -1
        self._unlogged: tuple[int, ...] = ()
        self._watermark = -1
        self._stop: m.Stop | None = None
        self._closed_why: str | None = None
        link.start(greet=self._greet, on_message=self._note, on_closed=self._note_closed)

    @property
    def local_host(self) -> str:
        return self._link.local_host

    @property
    def is_away(self) -> bool:
        """The coordinator is gone and may come back."""
        return self._link.is_away

    def send(self, message: m.FromWorker) -> None:
        """Says it now, or, when the coordinator is away, as soon as it is back."""
        try:
            with self._link.speaking:
                self._memory.said(message)
                self._link.send(message)
        except CoordinatorLost:
            with self._news:
                self._raise_if_gone()  # it said why before it closed
            raise

    def wait_welcome(self, *, timeout_s: float = 60.0) -> m.Welcome:
        return self._wait(lambda: self._welcome, "Welcome", timeout_s)

    def wait_resume(self, *, after_generation: int, timeout_s: float = 600.0) -> m.Resume:
        """The Resume of a later generation, even when that one was halted again meanwhile."""

        def newer() -> m.Resume | None:
            resume = self._resume
            return resume if resume and resume.generation > after_generation else None

        what = f"Resume after generation {after_generation}"
        return self._wait(newer, what, timeout_s)

    def wait_watermark(self, step: int, *, timeout_s: float = WATERMARK_WITHIN_S) -> None:
        """Returns when every live worker finished `step`. At once for step -1."""

        def reached() -> bool | None:
            self._raise_if_halted()
            return True if self._watermark >= step else None

        self._wait(reached, f"Watermark({step})", timeout_s)

    def wait_halt(self, generation: int, *, timeout_s: float) -> None:
        """Returns when `generation` is over. Raises when this worker has no part in what follows:
        it was fenced, or the job has ended."""

        def is_over() -> bool | None:
            return True if self._halt and self._halt.generation >= generation else None

        self._wait(is_over, f"Halt of generation {generation}", timeout_s)

    def raise_if_halted(self) -> None:
        """For the boundaries between actions."""
        with self._news:
            self._raise_if_halted()
            self._raise_if_gone()

    def is_boundary(self, step: int) -> bool:
        """Whether this generation ends by plan after `step`."""
        with self._news:
            return self._boundary is not None and self._boundary <= step

    def take_replan(self, step: int) -> m.Replan | None:
        """The plan to run from `step` on, once, when it changed."""
        with self._news:
            replan = self._replan
            if replan is None or replan.from_step > step:
                return None
            self._replan = None
            return replan

    def take_save(self, step: int) -> bool:
        """Whether a checkpoint is to be taken after `step`; says so once."""
        with self._news:
            if self._save is None or self._save.step != step:
                return False
            self._save = None
            return True

    def take_failed_saves(self) -> list[int]:
        """Steps whose checkpoints have failed on some stage; says so once."""
        with self._news:
            steps, self._failed_saves = self._failed_saves, []
            return steps

    @property
    def durable_step(self) -> int:
        """Of the newest checkpoint that is whole on disk; -1 for none."""
        with self._news:
            return self._durable

    @property
    def unlogged(self) -> tuple[int, ...]:
        """The boundaries that need no log."""
        with self._news:
            return self._unlogged

    def close(self) -> None:
        """A coordinator that is away is waited for when it must still hear how this one ended."""
        if self._memory.has_last_words:
            self._link.wait_back()
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, look: Callable[[], Awaited | None], what: str, timeout_s: float) -> Awaited:
        found: Awaited | None = None

        def is_over() -> bool:
            nonlocal found
            found = look()
            return found is not None or self._stop is not None or self._closed_why is not None

        with self._news:
            num_greetings = self._num_greetings
            while not self._news.wait_for(is_over, timeout_s):
                # Time in which nobody could have answered does not count.
                if not self.is_away and num_greetings == self._num_greetings:
                    source = f"the coordinator at {self._link.address}"
                    raise WaitTimedOut(what, source=source, after_s=timeout_s)
                num_greetings = self._num_greetings
            if found is None:
                self._raise_if_gone()
            assert found is not None
            return found

    def _raise_if_halted(self) -> None:
        if self._halt is not None:
            raise GenerationEnded(self._halt.generation, why=self._halt.why)

    def _raise_if_gone(self) -> None:
        if self._stop is not None:
            raise CoordinatorStopped(self._stop.why, exit_code=self._stop.exit_code)
        if self._closed_why is not None:
            raise CoordinatorLost(self._link.address, why=self._closed_why)

    def _greet(self) -> list[m.FromWorker]:
        with self._news:
            self._num_greetings += 1
        return self._memory.greeting()

    def _note(self, message: m.ToWorker) -> None:
        with self._link.speaking:
            self._memory.heard(message)
        if isinstance(message, m.Stop):
            self._link.expect_end()
        with self._news:
            self._write_down(message)
            self._news.notify_all()
        # Outside the lock: whoever it frees may ask this client why at once.
        if isinstance(message, m.Halt) and self.on_halt is not None:
            self.on_halt(message)

    def _write_down(self, message: m.ToWorker) -> None:
        match message:
            case m.Welcome():
                self._welcome = message
            case m.Resume():
                self._resume = message
                self._halt = self._replan = self._save = None
                self._boundary = message.boundary
                self._watermark = message.watermark
                self._durable = max(self._durable, message.durable)
                self._unlogged = message.unlogged
            case m.Replan():
                self._replan = message
            case m.Watermark():
                self._watermark = message.step
            case m.Boundary():
                self._boundary = message.after_step
            case m.Save() | m.SaveFailed() | m.Durable() | m.LogLess():
                self._write_down_saving(message)
            case m.Halt():
                self._halt = message
            case m.Stop():
                self._stop = message

    def _write_down_saving(self, message: m.Save | m.SaveFailed | m.Durable | m.LogLess) -> None:
        match message:
            case m.Save():
                self._save = message
            case m.SaveFailed(step):
                self._failed_saves.append(step)
            case m.Durable(step):
                self._durable = step
            case m.LogLess(boundaries):
                self._unlogged = boundaries

    def _note_closed(self, why: str) -> None:
        with self._news:
            self._closed_why = why
            self._news.notify_all()


def connect(
    address: str,
    *,
    hello: m.Hello,
    token: str = "",
    on_halt: OnHalt | None = None,
    settings: LinkSettings | None = None,
) -> Client:
    """Connects to the coordinator at `HOST:PORT` and says Hello."""
    link = open_link(address, "/worker", to_worker, token=token, settings=settings)
    return Client(link, hello=hello, on_halt=on_halt)
