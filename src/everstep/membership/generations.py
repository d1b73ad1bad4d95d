"""Generations: how one ends, where the workers go on from, and how the next begins.

Pure. The only place that forms generations. Invariants: their numbers only grow; the next is formed
when every live worker of the last has halted; a watermark is given when all of them hold its step.

How a generation ends:

    Halt       a loss, a broken channel, or a step to be taken again: everybody is stopped at once
    Boundary   a new worker waits: everybody stops by itself after a step chosen ahead
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep.core.errors import ProtocolBroken
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.facts import Meeting, Replay, RollBack, StepResult
from everstep.membership.progress import Progress
from everstep.membership.protection import protection
from everstep.membership.rebuilding import NoReplay, NotYet, Rebuilding
from everstep.membership.recovering import Decide, Hopeless, Recovery, Rung
from everstep.membership.regrouping import (
    Halting,
    as_report,
    copies_on_the_wire,
    is_still_running,
    survivors,
)
from everstep.membership.restarting import Restart, restore_newest
from everstep.membership.roster import Worker
from everstep.membership.states import Happening, State
from everstep.membership.traffic import Outcome
from everstep.membership.wording import who

FRUITLESS_LIMIT = 5
"""Changes of generation without a step in between, because of channels that broke for no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How the next generation begins."""

    decision: Recovery
    live: Mapping[WorkerId, Worker]
    replays: tuple[Replay, ...] = ()


class Generations:
    def __init__(
        self,
        books: Books,
        progress: Progress,
        restart: Restart,
        rebuilding: Rebuilding,
        *,
        decide: Decide,
        meeting: Meeting,
    ) -> None:
        self._books = books
        self._progress = progress
        self._restart = restart
        self._rebuilding = rebuilding
        self._decide = decide
        self._meeting = meeting

    def inherit(self, *, now_s: float) -> None:
        """The generation was formed by another coordinator."""
        self._progress.began_s = now_s

    # Steps within a generation.

    def step_done(self, worker: Worker, report: m.StepDone, now_s: float) -> None:
        self._progress.record(worker, report)
        self.close_step_when_done(now_s)

    def copied(self, worker: Worker, message: m.Copied, now_s: float) -> None:
        if message.generation != self._books.generation or worker.place is None:
            raise ProtocolBroken(f"it copied in {message.generation}", peer=str(worker))
        worker.finished_step = message.step
        worker.is_copying = False
        self.close_step_when_done(now_s)

    def replayed(self, worker: Worker, message: m.Replayed, now_s: float) -> None:
        """A stage's state is there again. What its last step gave may never have been told."""
        books = self._books
        if message.generation != books.generation or worker.place is None:
            raise ProtocolBroken(f"it replayed in {message.generation}", peer=str(worker))
        self._rebuilding.succeeded()
        books.emit("rebuilt", **who(worker), step=message.step)
        worker.finished_step = message.step
        worker.is_copying = False
        if message.step == books.ledger.open_step and worker.place not in books.ledger.reports:
            books.ledger.record(worker.place, as_report(message))
        self.close_step_when_done(now_s)

    def replay_failed(self, worker: Worker, message: m.ReplayFailed, now_s: float) -> None:
        """Perhaps another way is left, with what can still be read. Several may say so of one
        replay, and one worker twice: that counts once."""
        if message.generation == self._books.generation and self._books.halting is None:
            self._rebuilding.failed(f"{worker}: {message.why}")
            self.halt(now_s, why=f"{worker} cannot replay: {message.why}")

    def close_step_when_done(self, now_s: float) -> None:
        """The step that everybody has gets its watermark, unless it must be taken again."""
        books = self._books
        members = books.members_here().values()
        if books.halting is not None or not self._progress.is_step_done(members):
            return
        step = books.ledger.open_step
        redo = self._progress.close_step(now_s)
        if redo is not None:
            why = f"step {step} is taken again, scaled by {redo.scale:.6g}"
            self.halt(now_s, redo=redo, why=why)
            return
        for worker in members:
            if is_still_running(worker):  # else its Resume will say it
                books.send(worker.uid, m.Watermark(books.generation, step))

    # The end of a generation.

    def admit(self) -> None:
        """Chooses the step after which the new worker joins: one that nobody can have begun, for
        the reason that a replan gives, so nobody's work is thrown away."""
        books = self._books
        assert books.job is not None
        if books.halting is not None or books.boundary is not None:
            return  # a generation is being formed anyway
        after_step = books.ledger.open_step + 1
        if after_step + 1 >= books.job.steps:
            return  # the job is as good as done
        books.boundary = after_step
        for worker in books.members_here().values():
            if is_still_running(worker):
                books.send(worker.uid, m.Boundary(books.generation, after_step))

    def halt(self, now_s: float, *, why: str, redo: RollBack | None = None) -> None:
        books = self._books
        books.halting = Halting(since_s=now_s, why=why, redo=redo)
        for worker in books.members_here().values():
            if is_still_running(worker):
                worker.move(Happening.HALT_TOLD)
                books.send(worker.uid, m.Halt(books.generation, why))
        self.form_when_all_halted(now_s)

    def halted(self, worker: Worker, message: m.Halted, now_s: float) -> None:
        books = self._books
        is_by_plan = books.boundary is not None and message.finished_step == books.boundary
        if message.generation != books.generation or not (books.halting or is_by_plan):
            raise ProtocolBroken(f"it halted generation {message.generation}", peer=str(worker))
        if message.finished_step != worker.finished_step:
            # Its StepDone would have come first, on the same connection.
            raise ProtocolBroken(
                f"it halted after step {message.finished_step}"
                f" and had reported step {worker.finished_step}",
                peer=str(worker),
            )
        worker.operations = message.operations
        worker.is_operating = message.is_operating
        worker.logged = message.logged
        worker.move(Happening.HALTED)
        self.form_when_all_halted(now_s)

    def broken(self, worker: Worker, message: m.Broken, now_s: float) -> None:
        """A channel broke between two that may both be alive: they are connected anew."""
        books = self._books
        if message.generation != books.generation or books.halting is not None:
            return  # known already
        books.num_fruitless += 1
        if books.num_fruitless > FRUITLESS_LIMIT:
            books.fail(
                f"{worker} cannot reach its peers ({message.cause}), and connecting anew"
                f" {FRUITLESS_LIMIT} times did not help"
            )
            return
        self.halt(now_s, why=f"{worker} reports: {message.cause}")

    def form_when_all_halted(self, now_s: float) -> None:
        books = self._books
        if any(is_still_running(worker) for worker in books.members_here().values()):
            return
        if books.outage is not None:
            books.outage.halted_s = now_s
        halting = books.halting
        if halting is None:
            self.form(now_s, why=f"new workers join after step {books.boundary}")
        else:
            self.form(now_s, redo=halting.redo, why=halting.why)

    def look_again(self, now_s: float) -> None:
        """Somebody has come whom all may be waiting for, or nobody has for long."""
        if self._rebuilding.is_waiting:
            self.form_when_all_halted(now_s)

    # The beginning of the next.

    def form(self, now_s: float, *, why: str, redo: RollBack | None = None) -> None:
        """Starts the next generation with the workers that wait, from where they can all go on."""
        books = self._books
        waiting = {p: w for p, w in books.roster.placed().items() if w.state is State.STANDBY}
        # New workers come in at a boundary only: the scripts of those who were interrupted may be
        # in the middle of something that a new one's will not take part in.
        is_at_boundary = books.halting is None
        candidates = {
            p: w for p, w in waiting.items() if is_at_boundary or w.finished_step is not None
        }
        restored = restore_newest(books, candidates) if books.is_beginning else None
        way = self._find_way(candidates, waiting, now_s)
        if way is None:
            return
        decision, live = way.decision, way.live
        if restored is not None:
            decision = replace(
                decision,
                rungs=(Rung.CHECKPOINT,) * books.shape.stages,
                reason=f"all load the checkpoint of step {restored}",
            )
        is_rolled_forward = decision.finished_step == books.ledger.open_step
        result = books.ledger.result() if is_rolled_forward else None
        redo = self._settle(decision, live, way.replays, now_s) or redo
        self._begin(decision, live, now_s, why=why)
        if len(live) < len(waiting) and not books.has_all_steps():
            books.boundary = decision.finished_step
        for worker in live.values():
            worker.move(Happening.RESUMED)
            resume = self._resume(worker, decision, way.replays, redo=redo, result=result)
            books.send(worker.uid, resume)
            worker.owed_redo = worker.owed_restore = None

    def _find_way(
        self, live: Mapping[WorkerId, Worker], waiting: Mapping[WorkerId, Worker], now_s: float
    ) -> _Way | None:
        """How all get to one step; None when they wait for somebody, or all begin again."""
        decision = self._decide_for(live)
        if isinstance(decision, Recovery):
            return _Way(decision=decision, live=live)
        rebuild = self._rebuilding.look(live, waiting, now_s)
        if isinstance(rebuild, NotYet):
            return None
        if isinstance(rebuild, NoReplay):
            self._give_up(decision, why_no_replay=rebuild.reason)
            return None
        everybody = dict(sorted({**live, **rebuild.workers}.items()))
        recovery = self._decide_for(everybody, rebuilt=rebuild.stages)
        assert isinstance(recovery, Recovery), "every other stage is held by somebody"
        replays = self._rebuilding.plan(rebuild, live, last_step=recovery.finished_step)
        if isinstance(replays, NoReplay):
            self._give_up(decision, why_no_replay=replays.reason)
            return None
        return _Way(decision=recovery, live=everybody, replays=replays)

    def _decide_for(
        self, live: Mapping[WorkerId, Worker], *, rebuilt: frozenset[int] = frozenset()
    ) -> Recovery | Hopeless:
        books = self._books
        return self._decide(
            survivors(live.values()),
            shape=books.shape,
            open_step=books.ledger.open_step,
            rebuilt=rebuilt,
        )

    def _give_up(self, decision: Hopeless, *, why_no_replay: str) -> None:
        """A stage's state is gone. When all steps are done, some may have left with it in peace;
        when there are checkpoints, everybody begins again with the newest."""
        books = self._books
        self._rebuilding.forget()
        if books.job is not None and books.job.log is not None:
            reason = f"{decision.reason}, and it cannot be replayed: {why_no_replay}"
            decision = replace(decision, reason=reason)
        last_step = books.ledger.open_step - 1
        left = {w.place.stage for w in books.roster.left() if w.place is not None}
        if books.has_all_steps() and not books.members_here() and len(left) == books.shape.stages:
            books.end(Outcome(exit_code=0, why="finished"))
        elif not self._restart.begin(decision):
            what = f"training cannot go on: {decision.reason}"
            books.fail(f"{what} (last finished step: {last_step})")

    def _settle(
        self,
        decision: Recovery,
        live: Mapping[WorkerId, Worker],
        replays: tuple[Replay, ...],
        now_s: float,
    ) -> RollBack | None:
        """Brings the books to where the decision says. The open step stands when everybody has it,
        and may then still have to be scaled."""
        targets = {copy.target for copy in decision.copies}
        targets |= {place for replay in replays for place in replay.rebuilt}
        for place, worker in live.items():
            worker.is_copying = place in targets
            if place in decision.undo:
                worker.finished_step = decision.finished_step
        if decision.finished_step < self._books.ledger.open_step:
            self._books.ledger.reopen()
            return None
        if not self._progress.is_step_done(live.values()):
            return None  # some copy it first; their word closes it
        return self._progress.close_step(now_s)

    def _begin(
        self, decision: Recovery, live: Mapping[WorkerId, Worker], now_s: float, *, why: str
    ) -> None:
        books = self._books
        assert books.job is not None
        if books.is_beginning:
            books.emit("protection", stages=protection(books.job, live))
        books.generation += 1
        books.is_beginning = False
        books.halting = books.boundary = None
        books.members = {worker.uid for worker in live.values()}
        self._progress.began_s = now_s
        if books.outage is not None:
            books.outage.formed_s = now_s
        books.plans.make(books.job, live)
        books.emit(
            "generation",
            number=books.generation,
            resume_step=decision.finished_step + 1,
            reason=why,
            rungs={str(stage): str(rung) for stage, rung in enumerate(decision.rungs)},
            decision=decision.reason,
            **books.plans.fields(live),
        )

    def _resume(
        self,
        worker: Worker,
        decision: Recovery,
        replays: tuple[Replay, ...],
        *,
        redo: RollBack | None,
        result: StepResult | None,
    ) -> m.Resume:
        books, place = self._books, worker.place
        assert place is not None
        return m.Resume(
            generation=books.generation,
            step=decision.finished_step + 1,
            watermark=books.ledger.open_step - 1,
            actions=books.plans.actions_of(place),
            members=books.roster.members(books.members),
            meeting=self._meeting,
            profile_steps=books.settings.profile_steps if books.plans.durations is None else 0,
            redo=redo or worker.owed_redo,
            undo=place in decision.undo,
            copies=copies_on_the_wire(decision),
            operations=decision.operations,
            result=result,
            boundary=books.boundary,
            restore=worker.owed_restore,
            replays=replays,
            durable=books.durable_step,
            unlogged=books.unlogged,
        )

    def resumed(self, message: m.Resumed, now_s: float) -> None:
        outage = self._books.outage
        if outage is not None and message.generation == self._books.generation:
            outage.resumed_s = now_s
            outage.connect_s = max(outage.connect_s, message.connect_s)
            outage.copy_s = max(outage.copy_s, message.copy_s)
