"""The coordinator without its sockets: inputs go in, messages, events and the end come out.

Pure: no clock, socket or thread; planning is a function it is given. Only this class forms
generations. Invariants: generation numbers only grow, and the next is formed when every live worker
of the last has halted; a step is closed, and its event emitted, once, when every live worker has
reported it.

Why nobody is ever more than one step ahead: W of step t+1 waits for Watermark(t), and Watermark(t)
is sent when all have finished t. So between Watermark(t) and Watermark(t+1) every worker has
finished t, may have finished t+1, and may have run F and B, but not W, of t+2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.errors import ConfigError, EverstepError, ProtocolBroken
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.exits import describe_exit
from everstep.membership.ledger import StepLedger, StepSummary, decide_roll_back
from everstep.membership.planbook import PlanBook
from everstep.membership.planning import Planner
from everstep.membership.roster import AgentRecord, Roster, Shape, Worker
from everstep.membership.silence import GiveUp, Patience, Suspect, Trust, judge
from everstep.membership.states import Happening, State
from everstep.membership.traffic import (
    Disconnected,
    Effect,
    Emit,
    End,
    Input,
    Outcome,
    Received,
    Send,
    StopAsked,
    Tick,
)
from everstep.membership.wording import differences, who


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    profile_steps: int = 3
    """Steps that are measured before the plan is made anew from the measurements; 0 for never."""

    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halting:
    """Every worker is being stopped; then `redo` opens the next generation."""

    since_s: float
    why: str
    redo: m.RollBack


class World:
    def __init__(
        self,
        shape: Shape,
        settings: WorldSettings | None = None,
        *,
        planner: Planner,
        meeting: m.Meeting,
    ) -> None:
        self.shape = shape
        self.settings = settings or WorldSettings()
        self.roster = Roster(shape)
        self.ledger = StepLedger(shape.stages)
        self.generation = 0
        self.plans = PlanBook(shape, planner)
        self.job: m.JobFacts | None = None
        self.outcome: Outcome | None = None
        self._meeting = meeting
        self._halting: _Halting | None = None
        self._step_began_s = 0.0
        self._first_step_s = 0.0
        self._ticked_s: float | None = None
        self._effects: list[Effect] = []

    def handle(self, event: Input, *, now_s: float) -> list[Effect]:
        """Takes in one event and returns what is to be done, in order."""
        try:
            self._dispatch(event, now_s)
        except EverstepError as error:
            self._fail(str(error))
        effects, self._effects = self._effects, []
        return effects

    def _dispatch(self, event: Input, now_s: float) -> None:
        if self.outcome is not None:
            self._turn_away(event, self.outcome)
            return
        match event:
            case Received(uid, m.AgentHello() as message):
                self._agent_hello(uid, message)
            case Received(_, m.WorkerExited() as message):
                self._worker_exited(message, now_s)
            case Received(uid, m.Hello() as message):
                self._hello(uid, message, now_s)
            case Received(uid, message):
                self._from_worker(uid, message, now_s)
            case Disconnected(uid):
                self._disconnected(uid, now_s)
            case Tick():
                self._tick(now_s)
            case StopAsked(why=why, exit_code=exit_code):
                self._emit("stopped", why=why)
                self._end(Outcome(exit_code=exit_code, why=why))

    def _from_worker(self, uid: str, message: m.FromWorker | m.FromAgent, now_s: float) -> None:
        worker = self.roster.workers.get(uid)
        if worker is None:
            if uid not in self.roster.agents:
                self._send(uid, m.Stop("the first message must be Hello", 1))
            return
        if not worker.is_here:
            # Fenced: it was frozen or cut off, and the others have gone on without it.
            self._send(uid, m.Stop(f"{worker} was declared {worker.state}", 1))
            return
        self._heard(worker, now_s)
        match message:
            case m.Ready(job):
                self._ready(worker, job, now_s)
            case m.StepDone():
                self._step_done(worker, message, now_s)
            case m.Profile():
                self._profile(worker, message)
            case m.Halted():
                self._halted(worker, message, now_s)
            case m.Failed():
                self._user_failure(worker, message)
            case m.Finished():
                self._finished(worker, now_s)
            case _:
                pass  # a heartbeat was heard: that is all there is to it

    # Joining.

    def _agent_hello(self, uid: str, hello: m.AgentHello) -> None:
        seats = self.roster.seats_for(offered=hello.workers)
        self.roster.agents[uid] = AgentRecord(hello.host, seats)
        self._emit("agent_joined", host=hello.host, offered=hello.workers, started=len(seats))
        if seats:
            self._send(uid, m.Spawn(seats))

    def _hello(self, uid: str, hello: m.Hello, now_s: float) -> None:
        if uid in self.roster.workers:
            self._send(uid, m.Stop(f"the uid {uid} has been used: a worker joins once", 1))
            return
        worker = self.roster.add(hello, now_s=now_s)
        if worker.place is not None:
            self._welcome(worker, worker.place)

    def _welcome(self, worker: Worker, place: WorkerId) -> None:
        self._emit("worker_joined", **who(worker), host=worker.hello.host)
        welcome = m.Welcome(
            replica=place.replica,
            stage=place.stage,
            replicas=self.shape.replicas,
            stages=self.shape.stages,
        )
        self._send(worker.uid, welcome)

    def _ready(self, worker: Worker, job: m.JobFacts, now_s: float) -> None:
        worker.move(Happening.READY)
        worker.job = job
        self.job = self.job or job
        if job != self.job:
            raise ConfigError(
                "job", worker, f"must be the same on all workers: {differences(job, self.job)}"
            )
        placed = self.roster.placed()
        waiting = [w for w in placed.values() if w.state is State.STANDBY]
        if self.generation == 0 and len(waiting) == self.shape.num_workers:
            self._first_step_s = now_s
            self._form(now_s, redo=None, why="all workers are ready")

    # Generations.

    def _form(self, now_s: float, *, redo: m.RollBack | None, why: str) -> None:
        """Starts the next generation with the live workers, at the open step."""
        assert self.job is not None
        live = self.roster.placed()
        self.generation += 1
        self._halting = None
        self._step_began_s = now_s
        self.plans.make(self.job, live)
        members, step = self.roster.members(), self.ledger.open_step
        fields = {"number": self.generation, "resume_step": step, "reason": why}
        self._emit("generation", **fields, **self.plans.fields(live))
        for place, worker in live.items():
            worker.move(Happening.RESUMED)
            resume = m.Resume(
                generation=self.generation,
                step=step,
                actions=self.plans.actions_of(place),
                members=members,
                meeting=self._meeting,
                profile_steps=self.settings.profile_steps if self.plans.durations is None else 0,
                redo=redo,
            )
            self._send(worker.uid, resume)

    def _halt(self, now_s: float, *, redo: m.RollBack, why: str) -> None:
        self._halting = _Halting(since_s=now_s, why=why, redo=redo)
        for worker in self.roster.placed().values():
            worker.move(Happening.HALT_TOLD)
            self._send(worker.uid, m.Halt(self.generation, why))

    def _halted(self, worker: Worker, message: m.Halted, now_s: float) -> None:
        if message.generation != self.generation or self._halting is None:
            raise ProtocolBroken(f"it halted generation {message.generation}", peer=str(worker))
        if message.finished_step != worker.finished_step:
            # Its StepDone would have come first, on the same connection.
            raise ProtocolBroken(
                f"it halted after step {message.finished_step}"
                f" and had reported step {worker.finished_step}",
                peer=str(worker),
            )
        worker.move(Happening.HALTED)
        if all(w.state is State.STANDBY for w in self.roster.placed().values()):
            self.ledger.close()
            self._form(now_s, redo=self._halting.redo, why=self._halting.why)

    # Steps.

    def _step_done(self, worker: Worker, report: m.StepDone, now_s: float) -> None:
        if report.generation != self.generation or worker.place is None:
            raise ProtocolBroken(
                f"it finished step {report.step} of generation {report.generation}"
                f" in generation {self.generation}",
                peer=str(worker),
            )
        self.ledger.record(worker.place, report)
        worker.finished_step = report.step
        if self.ledger.is_complete(self.roster.placed()):
            self._close_step(now_s)

    def _close_step(self, now_s: float) -> None:
        """Every live worker has taken the open step; the norm decides whether it stands."""
        assert self.job is not None
        step, summary = self.ledger.open_step, self.ledger.summary()
        self._emit_step(step, summary, now_s)
        redo = decide_roll_back(self.job, step=step, norm=summary.norm)
        if redo is None:
            self.ledger.close()
            for worker in self.roster.placed().values():
                self._send(worker.uid, m.Watermark(self.generation, step))
            return
        why = f"step {step} is taken again, scaled by {redo.scale:.6g} (norm {summary.norm:.6g})"
        self._emit("rollback", step=step, scale=redo.scale, norm=summary.norm)
        self._halt(now_s, redo=redo, why=why)

    def _emit_step(self, step: int, summary: StepSummary, now_s: float) -> None:
        self._emit(
            "step",
            step=step,
            loss=summary.loss,
            generation=self.generation,
            seconds=now_s - self._step_began_s,
            metrics=summary.metrics,
            breakdown=summary.breakdown,
        )
        self._step_began_s = now_s

    def _profile(self, worker: Worker, message: m.Profile) -> None:
        worker.profile = message.durations
        live = self.roster.placed()
        profiles = {place: w.profile for place, w in live.items() if w.profile is not None}
        if len(profiles) < len(live):
            return
        self.plans.measure(profiles)
        for other in live.values():
            other.profile = None
        if self._halting is None:  # else the next generation is planned with them anyway
            self._replan()

    def _replan(self) -> None:
        """Changes the plan without ending the generation, at a step that nobody can have begun.

        Say the open step is t+1: Watermark(t) is sent, Watermark(t+1) is not. Step t+3 begins
        after a worker's own t+2 is finished, which needs W of t+2, which waits for Watermark(t+1).
        That comes after this Replan on the same ordered connection. So t+3 is safe for all, and
        nothing earlier is: a worker that finished t+1 may be in the middle of t+2.
        """
        assert self.job is not None
        live = self.roster.placed()
        self.plans.make(self.job, live)
        from_step = self.ledger.open_step + 2
        fields = {"generation": self.generation, "from_step": from_step}
        self._emit("replanned", **fields, **self.plans.fields(live))
        for place, worker in live.items():
            actions = self.plans.actions_of(place)
            replan = m.Replan(generation=self.generation, from_step=from_step, actions=actions)
            self._send(worker.uid, replan)

    # Leaving.

    def _finished(self, worker: Worker, now_s: float) -> None:
        worker.move(Happening.DONE)
        if all(w.state is State.FINISHED for w in self.roster.placed().values()):
            self._emit("finished", steps=self.ledger.open_step, seconds=now_s - self._first_step_s)

    def _user_failure(self, worker: Worker, failure: m.Failed) -> None:
        why = f"{worker} raised at {failure.where}"
        self._emit(
            "failed", why=why, **who(worker), where=failure.where, traceback=failure.traceback
        )
        self._end(Outcome(exit_code=1, why=why, traceback=failure.traceback))

    def _worker_exited(self, message: m.WorkerExited, now_s: float) -> None:
        how = describe_exit(message.code)
        worker = self.roster.workers.get(message.uid)
        if worker is None:
            self._fail(
                f"worker number {message.number} (pid {message.pid}) ended before it joined:"
                f" {how}; does the script call everstep.train?"
            )
        elif worker.is_here:
            self._gone(worker, how, now_s)

    def _disconnected(self, uid: str, now_s: float) -> None:
        worker = self.roster.workers.get(uid)
        agent = self.roster.agents.get(uid)
        if worker is not None and worker.is_here:
            self._gone(worker, "its connection closed", now_s)
        elif agent is not None and agent.is_here:
            agent.is_here = False
            self._emit("agent_lost", host=agent.host)
            missing = list(self.roster.unjoined(agent))
            if missing:
                self._fail(f"the agent on {agent.host} left before workers {missing} joined")

    def _gone(self, worker: Worker, how: str, now_s: float) -> None:
        worker.move(Happening.GONE)
        if worker.state is State.LOST:
            self._emit("worker_lost", **who(worker), how=how)
            self._after_loss(worker, how, now_s)
        elif not self.roster.here():
            self._end(Outcome(exit_code=0, why="finished"))

    def _after_loss(self, worker: Worker, how: str, now_s: float) -> None:  # noqa: ARG002
        """Where the recovery decision is asked. Until there is one, a loss ends the job."""
        last = self.ledger.open_step - 1
        self._fail(f"{worker} is lost: {how} (last finished step: {last})")

    # Time.

    def _tick(self, now_s: float) -> None:
        gap_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        for worker in self.roster.here():
            if gap_s > self.settings.patience.tick_gap_s:
                worker.heard_s += gap_s
            if self.outcome is None:
                self._check_silence(worker, now_s)

    def _check_silence(self, worker: Worker, now_s: float) -> None:
        halting = self._halting
        verdict = judge(
            worker.state,
            silent_s=now_s - worker.heard_s,
            halting_s=None if halting is None else now_s - halting.since_s,
            patience=self.settings.patience,
        )
        match verdict:
            case GiveUp(how):
                self._gone(worker, how, now_s)
            case Suspect():
                worker.move(Happening.SILENT)
            case Trust():
                pass

    def _heard(self, worker: Worker, now_s: float) -> None:
        worker.heard_s = now_s
        if worker.state is State.SUSPECTED:
            worker.move(Happening.HEARD)

    # Ending.

    def _fail(self, why: str) -> None:
        if self.outcome is None:
            self._emit("failed", why=why, traceback=None)
            self._end(Outcome(exit_code=1, why=why))

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        stop = m.Stop(outcome.why, outcome.exit_code)
        for worker in self.roster.here():
            self._send(worker.uid, stop)
        for uid, agent in self.roster.agents.items():
            if agent.is_here:
                self._send(uid, stop)
        self._effects.append(End(outcome))

    def _turn_away(self, event: Input, outcome: Outcome) -> None:
        """Latecomers are told that there is nothing left to join."""
        if isinstance(event, Received) and isinstance(event.message, m.Hello | m.AgentHello):
            self._send(event.uid, m.Stop(outcome.why, outcome.exit_code))

    def _send(self, uid: str, message: m.ToWorker | m.ToAgent) -> None:
        self._effects.append(Send(uid, message))

    def _emit(self, event: str, **fields: object) -> None:
        self._effects.append(Emit(event, fields))
