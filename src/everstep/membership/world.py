"""The coordinator without its sockets: inputs go in, messages, events and the end come out.

Pure: no clock, socket or thread; planning is a function it is given. It only finds the part that an
input is for; all parts share one set of books:

    attendance.py    who comes and who goes
    generations.py   how a generation ends and the next begins
    progress.py      steps, and how long things take
    moving.py        live workers to stages that were hit harder
    saving.py        checkpoints: which step, and what became of them
    rebuilding.py    stages that nobody holds: from their checkpoint and the others' logs
    restarting.py    all begin again with the newest, when a stage's state is gone
    inheritance.py   what another coordinator left behind
    books.py         all that is known, and what is to be said

Why nobody is ever more than one step ahead: W of step t+1 waits for Watermark(t), and Watermark(t)
is sent when all have finished t. So between Watermark(t) and Watermark(t+1) every worker has
finished t, may have finished t+1, and may have run F and B, but not W, of t+2.
"""

from __future__ import annotations

from everstep.core.errors import EverstepError
from everstep.membership import messages as m
from everstep.membership.attendance import Attendance
from everstep.membership.books import Books, WorldSettings
from everstep.membership.facts import JobFacts, Meeting
from everstep.membership.generations import Generations
from everstep.membership.inheritance import Inheritance
from everstep.membership.ledger import StepLedger
from everstep.membership.moving import Moving, Normalizer
from everstep.membership.planbook import PlanBook
from everstep.membership.planning import Planner
from everstep.membership.progress import Progress
from everstep.membership.rebuilding import ChooseLogs, PlanReplay, Rebuilding
from everstep.membership.recovering import Decide
from everstep.membership.replacing import Replacements
from everstep.membership.restarting import Restart
from everstep.membership.roster import Roster, Shape, Worker
from everstep.membership.saving import Saving
from everstep.membership.traffic import (
    Disconnected,
    Effect,
    Input,
    Outcome,
    Received,
    StopAsked,
    TakenOver,
    Tick,
)

__all__ = ["World", "WorldSettings"]


class World:
    def __init__(
        self,
        shape: Shape,
        settings: WorldSettings | None = None,
        *,
        planner: Planner,
        decide: Decide,
        meeting: Meeting,
        normalize: Normalizer | None = None,
        plan_replay: PlanReplay | None = None,
        choose_logs: ChooseLogs | None = None,
    ) -> None:
        self._books = Books(shape, settings or WorldSettings(), planner=planner)
        self._progress = Progress(self._books)
        replacements = Replacements(self._books)
        rebuilding = Rebuilding(self._books, replacements, plan_replay, choose_logs)
        self._generations = Generations(
            self._books,
            self._progress,
            Restart(self._books, replacements),
            rebuilding,
            decide=decide,
            meeting=meeting,
        )
        self._saving = Saving(self._books, rebuilding)
        self._attendance = Attendance(self._books, self._generations, replacements)
        self._moving = Moving(self._books, self._attendance, normalize)
        self._inheritance = Inheritance(self._books, self._attendance, self._generations)

    @property
    def shape(self) -> Shape:
        return self._books.shape

    @property
    def settings(self) -> WorldSettings:
        return self._books.settings

    @property
    def roster(self) -> Roster:
        return self._books.roster

    @property
    def ledger(self) -> StepLedger:
        return self._books.ledger

    @property
    def plans(self) -> PlanBook:
        return self._books.plans

    @property
    def generation(self) -> int:
        return self._books.generation

    @property
    def job(self) -> JobFacts | None:
        return self._books.job

    @property
    def outcome(self) -> Outcome | None:
        return self._books.outcome

    def handle(self, event: Input, *, now_s: float) -> list[Effect]:
        """Takes in one event and returns what is to be done, in order."""
        try:
            if self.outcome is None:
                self._dispatch(event, now_s)
            else:
                self._turn_away(event, self.outcome)
        except EverstepError as error:
            self._books.fail(str(error))
        return self._books.take_effects()

    def _turn_away(self, event: Input, outcome: Outcome) -> None:
        """Latecomers are told that there is nothing left to join."""
        greetings = m.Hello | m.Rejoin | m.AgentHello
        if isinstance(event, Received) and isinstance(event.message, greetings):
            self._books.send(event.uid, m.Stop(outcome.why, outcome.exit_code))

    def _dispatch(self, event: Input, now_s: float) -> None:
        attendance = self._attendance
        match event:
            case Received(uid, m.AgentHello() as message):
                attendance.agent_hello(uid, message, now_s)
            case Received(_, m.WorkerExited() as message):
                attendance.worker_exited(message, now_s)
            case Received(uid, m.Hello() | m.Rejoin() as message):
                attendance.greeted(uid, message, now_s)
            case Received(uid, message):
                self._from_worker(uid, message, now_s)
            case Disconnected(uid):
                attendance.disconnected(uid, now_s)
            case Tick():
                attendance.tick(now_s)
                self._moving.consider(now_s)
            case TakenOver(stock):
                self._inheritance.accept(stock, now_s)
            case StopAsked(why=why, exit_code=exit_code):
                self._books.emit("stopped", why=why)
                self._books.end(Outcome(exit_code=exit_code, why=why))

    def _from_worker(self, uid: str, message: m.FromWorker | m.FromAgent, now_s: float) -> None:
        worker = self.roster.workers.get(uid)
        if worker is None:
            if uid not in self.roster.agents:
                self._books.send(uid, m.Stop("the first message must be Hello", 1))
            return
        if not worker.is_here:
            # Fenced: it was frozen or cut off, and the others have gone on without it.
            self._books.send(uid, m.Stop(f"{worker} was declared {worker.state}", 1))
            return
        self._attendance.heard(worker, now_s)
        match message:
            case m.Ready():
                self._attendance.ready(worker, message, now_s)
            case m.Finished():
                self._attendance.finished(worker, now_s)
            case m.Failed():
                self._attendance.user_failure(worker, message)
            case m.Profile():
                self._progress.profile(worker, message)
            case m.SaveWanted():
                self._saving.wanted(message)
            case m.Saved():
                self._saving.saved(worker, message)
            case _:
                self._about_generations(worker, message, now_s)

    def _about_generations(
        self, worker: Worker, message: m.FromWorker | m.FromAgent, now_s: float
    ) -> None:
        generations = self._generations
        match message:
            case m.StepDone():
                generations.step_done(worker, message, now_s)
            case m.Copied():
                generations.copied(worker, message, now_s)
            case m.Replayed():
                generations.replayed(worker, message, now_s)
            case m.ReplayFailed():
                generations.replay_failed(worker, message, now_s)
            case m.Halted():
                generations.halted(worker, message, now_s)
            case m.Broken():
                generations.broken(worker, message, now_s)
            case m.Resumed():
                generations.resumed(message, now_s)
            case _:
                pass  # a heartbeat was heard: that is all there is to it
