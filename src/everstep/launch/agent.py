"""The agent: starts this node's workers, tells the coordinator when one ends, stops them all.

One thread decides, from one queue of what happened: messages, exits, signals. It is (through the
warm parent) the parent of its workers: when it dies, however, they die. When the coordinator dies,
they live on, and the one that is started in its place is told what runs here and what has ended.
"""

from __future__ import annotations

import os
import queue
import signal
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from everstep.core.errors import CoordinatorLost
from everstep.launch.context import WorkerContext
from everstep.launch.orders import Exited, Warm
from everstep.launch.output import Output, Sink, write_line
from everstep.launch.warm import PRELOAD, ParentGone, Script, WarmParent, WorkerProcess
from everstep.membership import messages as m
from everstep.membership.codec import to_agent
from everstep.membership.exits import describe_exit
from everstep.membership.facts import Seat
from everstep.membership.link import RETURN_WITHIN_S, Link, LinkSettings, open_link
from everstep.membership.traffic import Outcome

KILL_AFTER_S = 2.0
"""From SIGTERM to SIGKILL."""

LEAVE_WITHIN_S = 30.0
"""For workers to end by themselves when the job is done."""

DRAIN_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    address: str
    """`HOST:PORT` of the coordinator."""

    workers: int
    """How many this node offers to run."""

    token: str = field(default="", repr=False)
    host: str | None = None
    """The address at which workers elsewhere reach this node; None for the one that leads to the
    coordinator."""

    preload: tuple[str, ...] = PRELOAD
    return_within_s: float = RETURN_WITHIN_S
    """How long a coordinator that went away is waited for."""


@dataclass(frozen=True, slots=True)
class _Closed:
    why: str


@dataclass(frozen=True, slots=True)
class _StopAsked:
    outcome: Outcome


_Happening: TypeAlias = m.ToAgent | Exited | Warm | ParentGone | _Closed | _StopAsked


class Agent:
    def __init__(self, script: Script, settings: AgentSettings, *, sink: Sink = write_line) -> None:
        self._script = script
        self._settings = settings
        self._uid = f"agent-{uuid.uuid4().hex[:12]}"
        self._output = Output(sink)
        self._inbox: queue.SimpleQueue[_Happening] = queue.SimpleQueue()
        self._is_warm = False
        self._given: list[Seat] = []
        self._seats: list[Seat] = []
        """To be started when the parent is warm."""

        self._running: dict[str, tuple[Seat, WorkerProcess]] = {}
        self._local_numbers: dict[int, int] = {}
        """By the number of a seat."""

        self._ended: list[m.WorkerExited] = []
        self._stopping: Outcome | None = None
        self._deadline_s: float | None = None
        self._bad_exit: Outcome | None = None

    def run(self) -> Outcome:
        """Until the coordinator or a signal says stop and every worker is gone."""
        settings = self._settings
        link_settings = LinkSettings(
            source_host=settings.host, return_within_s=settings.return_within_s
        )
        with WarmParent(self._inbox.put, preload=settings.preload) as parent:
            link = open_link(
                settings.address, "/agent", to_agent, token=settings.token, settings=link_settings
            )
            try:
                link.start(
                    greet=lambda: [self._hello(link)],
                    on_message=self._inbox.put,
                    on_closed=self._note_closed,
                )
                return self._supervise(parent, link)
            finally:
                link.close()
                self._output.wait_drained(timeout_s=DRAIN_WITHIN_S)

    def request_stop(self, outcome: Outcome) -> None:
        """From any thread, and from signal handlers."""
        self._inbox.put(_StopAsked(outcome))

    def _hello(self, link: Link[m.ToAgent]) -> m.AgentHello:
        """On the link's thread when a coordinator comes back; whoever changes what it tells holds
        `link.speaking`."""
        pending = [seat.number for seat in self._seats]
        return m.AgentHello(
            uid=self._uid,
            host=link.local_host,
            workers=self._settings.workers,
            seats=tuple(self._given),
            running=tuple(pending + [seat.number for seat, _ in self._running.values()]),
            ended=tuple(self._ended),
        )

    def _note_closed(self, why: str) -> None:
        self._inbox.put(_Closed(why))

    def _supervise(self, parent: WarmParent, link: Link[m.ToAgent]) -> Outcome:
        while self._stopping is None or self._running:
            try:
                happening = self._inbox.get(timeout=self._patience_s())
            except queue.Empty:
                self._press(parent)
            else:
                self._handle(happening, parent, link)
        # Training may be done and a script still end badly, in what it does afterwards.
        return self._bad_exit or self._stopping if self._stopping.exit_code == 0 else self._stopping

    def _handle(self, happening: _Happening, parent: WarmParent, link: Link[m.ToAgent]) -> None:
        match happening:
            case m.Spawn(seats):
                self._take(seats, link)
            case Warm():
                self._is_warm = True
            case Exited():
                self._exited(happening, link)
            case m.Stop(why, exit_code):
                link.expect_end()
                self._stop(Outcome(exit_code=exit_code, why=why), parent)
            case _StopAsked(outcome):
                self._stop(outcome, parent)
            case _Closed(why):
                error = CoordinatorLost(self._settings.address, why=why)
                self._stop(Outcome(exit_code=1, why=str(error)), parent)
            case ParentGone():
                self._running.clear()
                self._stop(Outcome(exit_code=1, why="the warm parent of the workers died"), parent)
        # Forking before the parent is warm would block, and a signal would have to wait.
        while self._is_warm and self._seats and self._stopping is None:
            with link.speaking:
                self._spawn(self._seats.pop(0), parent, link)

    def _take(self, seats: tuple[Seat, ...], link: Link[m.ToAgent]) -> None:
        with link.speaking:
            self._seats += seats
            self._given += [seat for seat in seats if seat not in self._given]

    def _spawn(self, seat: Seat, parent: WarmParent, link: Link[m.ToAgent]) -> None:
        uid = f"{self._uid}-{seat.number}-{uuid.uuid4().hex[:6]}"
        context = WorkerContext(
            coordinator=self._settings.address,
            uid=uid,
            number=seat.number,
            host=self._settings.host or link.local_host,
            local_number=self._local_number(seat),
            num_local=self._settings.workers,
            token=self._settings.token,
        )
        process = parent.spawn(
            self._script,
            uid=uid,
            environment=context.environment(),
            num_threads=max(1, len(os.sched_getaffinity(0)) // self._settings.workers),
        )
        self._running[uid] = seat, process
        self._output.follow(process.output, label=seat.label)

    def _local_number(self, seat: Seat) -> int:
        """The one this seat had, or the first that no worker here has."""
        taken = {self._local_numbers[each.number] for each, _ in self._running.values()}
        number = self._local_numbers.get(seat.number)
        if number is None or number in taken:
            number = next(each for each in count() if each not in taken)
            self._local_numbers[seat.number] = number
        return number

    def _exited(self, exited: Exited, link: Link[m.ToAgent]) -> None:
        with link.speaking:
            seat, _ = self._running.pop(exited.uid)
            message = m.WorkerExited(
                uid=exited.uid, number=seat.number, pid=exited.pid, code=exited.code
            )
            self._ended.append(message)
            with suppress(CoordinatorLost):  # a _Closed is in the queue
                link.send(message)
        # One ended by a signal is a loss: whether the job went on without it, the coordinator says.
        if exited.code > 0 and self._bad_exit is None:
            why = f"worker {seat.label} (pid {exited.pid}): {describe_exit(exited.code)}"
            self._bad_exit = Outcome(exit_code=1, why=why)

    def _stop(self, outcome: Outcome, parent: WarmParent) -> None:
        if self._stopping is not None:
            # Said again: the Stop that follows a signal, a closed connection, or an impatient user.
            return
        self._stopping = outcome
        if outcome.exit_code == 0:
            self._deadline_s = time.monotonic() + LEAVE_WITHIN_S
        else:
            self._signal_all(parent, signal.SIGTERM)
            self._deadline_s = time.monotonic() + KILL_AFTER_S

    def _patience_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _press(self, parent: WarmParent) -> None:
        """Whoever is still there after its time is killed."""
        self._signal_all(parent, signal.SIGKILL)
        self._deadline_s = time.monotonic() + KILL_AFTER_S

    def _signal_all(self, parent: WarmParent, number: int) -> None:
        for _, process in self._running.values():
            parent.signal(process, number)
