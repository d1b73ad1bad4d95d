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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep.core.errors import ConfigError, EverstepError, ProtocolBroken
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.exits import describe_exit
from everstep.membership.ledger import StepLedger, StepSummary, decide_roll_back
from everstep.membership.planbook import PlanBook
from everstep.membership.planning import Planner
from everstep.membership.recovering import Decide, Hopeless, Recovery
from everstep.membership.regrouping import (
    Halting,
    Outage,
    Respawn,
    copies_on_the_wire,
    is_still_running,
    survivors,
)
from everstep.membership.roster import AgentRecord, Roster, Shape, Worker
from everstep.membership.silence import GiveUp, Patience, Suspect, Trust, judge
from everstep.membership.states import Happening, State
from everstep.membership.takeover import Stock
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
    TakenOver,
    Tick,
)
from everstep.membership.wording import differences, who

FRUITLESS_LIMIT = 5
"""Changes of generation without a step in between, because of channels that broke for no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSettings:
    profile_steps: int = 3
    """Steps that are measured before the plan is made anew from the measurements; 0 for never."""

    patience: Patience = field(default_factory=Patience)

    replace_after_s: float | None = None
    """A lost worker is started again so long after its loss; None for never."""


class World:
    def __init__(
        self,
        shape: Shape,
        settings: WorldSettings | None = None,
        *,
        planner: Planner,
        decide: Decide,
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
        self._decide = decide
        self._halting: Halting | None = None
        self._boundary: int | None = None
        self._outage: Outage | None = None
        self._members: set[str] = set()
        self._respawns: list[Respawn] = []
        self._has_finished = False
        self._told_step: int | None = None
        self._num_fruitless = 0
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
                self._agent_hello(uid, message, now_s)
            case Received(_, m.WorkerExited() as message):
                self._worker_exited(message, now_s)
            case Received(uid, m.Hello() | m.Rejoin() as message):
                self._greeted(uid, message, now_s)
            case Received(uid, message):
                self._from_worker(uid, message, now_s)
            case Disconnected(uid):
                self._disconnected(uid, now_s)
            case Tick():
                self._tick(now_s)
            case TakenOver(stock):
                self._take_over(stock, now_s)
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
            case m.Failed():
                self._user_failure(worker, message)
            case m.Finished():
                self._finished(worker, now_s)
            case _:
                self._about_generations(worker, message, now_s)

    def _about_generations(
        self, worker: Worker, message: m.FromWorker | m.FromAgent, now_s: float
    ) -> None:
        match message:
            case m.Halted():
                self._halted(worker, message, now_s)
            case m.Broken():
                self._broken(worker, message, now_s)
            case m.Resumed():
                self._resumed(message)
            case m.Copied():
                self._copied(worker, message, now_s)
            case _:
                pass  # a heartbeat was heard: that is all there is to it

    # Joining.

    def _agent_hello(self, uid: str, hello: m.AgentHello, now_s: float) -> None:
        is_new = not hello.seats
        seats = self.roster.seats_for(offered=hello.workers) if is_new else hello.seats
        self.roster.agents[uid] = AgentRecord(hello.host, seats)
        started = len(seats) if is_new else 0
        self._emit("agent_joined", host=hello.host, offered=hello.workers, started=started)
        if started:
            self._send(uid, m.Spawn(seats))
        if self.job is None or self.ledger.open_step < self.job.steps:
            for number in hello.empty_seats():
                self._fill_seat(number, now_s)

    def _fill_seat(self, number: int, now_s: float) -> None:
        """The agent's worker ended when there was no coordinator to tell."""
        if not self._replace(number, now_s) and self.generation == 0:
            self._fail(f"worker number {number} is lost before training began")

    def _greeted(self, uid: str, greeting: m.Hello | m.Rejoin, now_s: float) -> None:
        if isinstance(greeting, m.Rejoin):
            self._rejoin(uid, greeting, now_s)
        else:
            self._hello(uid, greeting, now_s)

    def _hello(self, uid: str, hello: m.Hello, now_s: float) -> None:
        if uid in self.roster.workers:
            self._send(uid, m.Stop(f"the uid {uid} has been used: a worker joins once", 1))
            return
        worker = self.roster.add(hello, now_s=now_s)
        if worker.place is not None:
            self._welcome(worker, worker.place)

    def _rejoin(self, uid: str, rejoin: m.Rejoin, now_s: float) -> None:
        """Too late for the take-over: only one that never trained is still of use."""
        is_known = uid in self.roster.workers
        if is_known or rejoin.generation > 0 or rejoin.place in self.roster.placed():
            self._send(uid, m.Stop("the others have gone on without it", 1))
            return
        worker = Worker(rejoin.hello, rejoin.place, now_s)
        worker.finished_step = -1 if self.generation == 0 else None
        self.roster.workers[uid] = worker
        if rejoin.job is not None:
            self._ready(worker, rejoin.job, now_s)

    def _welcome(self, worker: Worker, place: WorkerId) -> None:
        worker.finished_step = -1 if self.generation == 0 else None
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
        waiting = [w for w in self.roster.placed().values() if w.state is State.STANDBY]
        if self.generation > 0:
            self._admit()
        elif len(waiting) == self.shape.num_workers:
            self._first_step_s = now_s
            self._form(now_s, why="all workers are ready")

    def _admit(self) -> None:
        """Chooses the step after which the new worker joins: one that nobody can have begun, for
        the reason `_replan` gives, so nobody's work is thrown away."""
        assert self.job is not None
        if self._halting is not None or self._boundary is not None:
            return  # a generation is being formed anyway
        after_step = self.ledger.open_step + 1
        if after_step + 1 >= self.job.steps:
            return  # the job is as good as done
        self._boundary = after_step
        for worker in self.roster.placed().values():
            if is_still_running(worker):
                self._send(worker.uid, m.Boundary(self.generation, after_step))

    # Generations.

    def _form(self, now_s: float, *, why: str, redo: m.RollBack | None = None) -> None:
        """Starts the next generation with the workers that wait, from where they can all go on."""
        assert self.job is not None
        live = {p: w for p, w in self.roster.placed().items() if w.state is State.STANDBY}
        decision = self._decide(
            survivors(live.values()), shape=self.shape, open_step=self.ledger.open_step
        )
        if isinstance(decision, Hopeless):
            last = self.ledger.open_step - 1
            self._fail(f"training cannot go on: {decision.reason} (last finished step: {last})")
            return
        is_rolled_forward = decision.finished_step == self.ledger.open_step
        result = self.ledger.result() if is_rolled_forward else None
        redo = self._settle(decision, live, now_s) or redo
        self.generation += 1
        self._halting = self._boundary = None
        self._step_began_s = now_s
        self.plans.make(self.job, live)
        step = decision.finished_step + 1
        fields = {"number": self.generation, "resume_step": step, "reason": why}
        recovery = {
            "rungs": {str(stage): str(rung) for stage, rung in enumerate(decision.rungs)},
            "decision": decision.reason,
        }
        self._emit("generation", **fields, **recovery, **self.plans.fields(live))
        if self._outage is not None:
            self._outage.formed_s = now_s
        members = self.roster.members()
        self._members = {member.uid for member in members}
        for place, worker in live.items():
            worker.move(Happening.RESUMED)
            resume = m.Resume(
                generation=self.generation,
                step=step,
                watermark=self.ledger.open_step - 1,
                actions=self.plans.actions_of(place),
                members=members,
                meeting=self._meeting,
                profile_steps=self.settings.profile_steps if self.plans.durations is None else 0,
                redo=redo or worker.owed_redo,
                undo=place in decision.undo,
                copies=copies_on_the_wire(decision),
                operations=decision.operations,
                result=result,
            )
            worker.owed_redo = None
            self._send(worker.uid, resume)

    def _settle(
        self, decision: Recovery, live: Mapping[WorkerId, Worker], now_s: float
    ) -> m.RollBack | None:
        """Brings the books to where the decision says. The open step stands when everybody has it,
        and may then still have to be scaled."""
        targets = {copy.target for copy in decision.copies}
        for place, worker in live.items():
            worker.is_copying = place in targets
            if place in decision.undo:
                worker.finished_step = decision.finished_step
        if decision.finished_step < self.ledger.open_step:
            self.ledger.reopen()
            return None
        if not self._is_step_done(live.values()):
            return None  # some copy it first; their word closes it
        redo = self._judge_step(now_s)
        self.ledger.close()
        return redo

    def _halt(self, now_s: float, *, why: str, redo: m.RollBack | None = None) -> None:
        self._halting = Halting(since_s=now_s, why=why, redo=redo)
        for worker in self.roster.placed().values():
            if is_still_running(worker) and worker.state is not State.HALTING:
                worker.move(Happening.HALT_TOLD)
                self._send(worker.uid, m.Halt(self.generation, why))
        self._form_when_all_halted(now_s)

    def _halted(self, worker: Worker, message: m.Halted, now_s: float) -> None:
        is_by_plan = self._boundary is not None and message.finished_step == self._boundary
        if message.generation != self.generation or not (self._halting or is_by_plan):
            raise ProtocolBroken(f"it halted generation {message.generation}", peer=str(worker))
        if message.finished_step != worker.finished_step:
            # Its StepDone would have come first, on the same connection.
            raise ProtocolBroken(
                f"it halted after step {message.finished_step}"
                f" and had reported step {worker.finished_step}",
                peer=str(worker),
            )
        worker.operations = message.operations
        worker.move(Happening.HALTED)
        self._form_when_all_halted(now_s)

    def _form_when_all_halted(self, now_s: float) -> None:
        if any(is_still_running(worker) for worker in self.roster.placed().values()):
            return
        if self._outage is not None:
            self._outage.halted_s = now_s
        halting = self._halting
        if halting is None:
            self._form(now_s, why=f"new workers join after step {self._boundary}")
        else:
            self._form(now_s, redo=halting.redo, why=halting.why)

    def _broken(self, worker: Worker, message: m.Broken, now_s: float) -> None:
        """A channel broke between two that may both be alive: they are connected anew."""
        if message.generation != self.generation or self._halting is not None:
            return  # known already
        self._num_fruitless += 1
        if self._num_fruitless > FRUITLESS_LIMIT:
            self._fail(
                f"{worker} cannot reach its peers ({message.cause}), and connecting anew"
                f" {FRUITLESS_LIMIT} times did not help"
            )
            return
        self._halt(now_s, why=f"{worker} reports: {message.cause}")

    def _resumed(self, message: m.Resumed) -> None:
        if self._outage is not None and message.generation == self.generation:
            self._outage.connect_s = max(self._outage.connect_s, message.connect_s)
            self._outage.copy_s = max(self._outage.copy_s, message.copy_s)

    def _copied(self, worker: Worker, message: m.Copied, now_s: float) -> None:
        if message.generation != self.generation or worker.place is None:
            raise ProtocolBroken(f"it copied in {message.generation}", peer=str(worker))
        worker.finished_step = message.step
        worker.is_copying = False
        self._close_step_when_done(now_s)

    def _members_here(self) -> dict[WorkerId, Worker]:
        """The live workers of the current generation, those that have halted among them."""
        return {p: w for p, w in self.roster.placed().items() if w.uid in self._members}

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
        self._close_step_when_done(now_s)

    def _close_step_when_done(self, now_s: float) -> None:
        if self._halting is None and self._is_step_done(self._members_here().values()):
            self._close_step(now_s)

    def _is_step_done(self, workers: Iterable[Worker]) -> bool:
        open_step = self.ledger.open_step
        return all(w.finished_step == open_step and not w.is_copying for w in workers)

    def _close_step(self, now_s: float) -> None:
        """Every live worker has taken the open step; the norm decides whether it stands."""
        step = self.ledger.open_step
        redo = self._judge_step(now_s)
        self.ledger.close()
        if redo is not None:
            why = f"step {step} is taken again, scaled by {redo.scale:.6g}"
            self._halt(now_s, redo=redo, why=why)
            return
        for worker in self._members_here().values():
            if is_still_running(worker):  # else its Resume will say it
                self._send(worker.uid, m.Watermark(self.generation, step))

    def _judge_step(self, now_s: float) -> m.RollBack | None:
        """Tells of the open step, which everybody has taken; whether it must be scaled."""
        assert self.job is not None
        step, summary = self.ledger.open_step, self.ledger.summary()
        self._emit_step(step, summary, now_s)
        redo = decide_roll_back(self.job, step=step, norm=summary.norm)
        if redo is not None:
            self._emit("rollback", step=step, scale=redo.scale, norm=summary.norm)
        return redo

    def _emit_step(self, step: int, summary: StepSummary, now_s: float) -> None:
        if step != self._told_step:
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
        self._num_fruitless = 0
        if self._outage is not None and self._halting is None and self._outage.formed_s:
            self._emit("recovered", step=step, **self._outage.fields(now_s=now_s))
            self._outage = None

    def _profile(self, worker: Worker, message: m.Profile) -> None:
        worker.profile = message.durations
        if self._halting is not None:
            return  # the next generation measures again
        live = self._members_here()
        profiles = {place: w.profile for place, w in live.items() if w.profile is not None}
        if len(profiles) < len(live) or len({p.stage for p in live}) < self.shape.stages:
            return
        self.plans.measure(profiles)
        for other in live.values():
            other.profile = None
        if self._boundary is None:  # else the next generation is planned with them anyway
            self._replan()

    def _replan(self) -> None:
        """Changes the plan without ending the generation, at a step that nobody can have begun.

        Say the open step is t+1: Watermark(t) is sent, Watermark(t+1) is not. Step t+3 begins
        after a worker's own t+2 is finished, which needs W of t+2, which waits for Watermark(t+1).
        That comes after this Replan on the same ordered connection. So t+3 is safe for all, and
        nothing earlier is: a worker that finished t+1 may be in the middle of t+2.
        """
        assert self.job is not None
        live = self._members_here()
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
        self._tell_when_finished(now_s)

    def _tell_when_finished(self, now_s: float) -> None:
        members = self._members_here().values()
        if not self._has_finished and all(w.state is State.FINISHED for w in members):
            self._has_finished = True
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
        if worker is None and self.generation > 0:
            self._emit("replacement_failed", number=message.number, how=how)
            self._replace(message.number, now_s, again=True)
        elif worker is None:
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
            if missing and self.generation == 0:
                self._fail(f"the agent on {agent.host} left before workers {missing} joined")

    def _gone(self, worker: Worker, how: str, now_s: float) -> None:
        worker.move(Happening.GONE)
        if worker.state is State.LOST:
            self._emit("worker_lost", **who(worker), how=how)
            self._after_loss(worker, how, now_s)
        elif not self._members_here():
            # Whoever waits to join has come too late.
            self._tell_when_finished(now_s)
            self._end(Outcome(exit_code=0, why="finished"))
        elif self._halting is not None:
            self._form_when_all_halted(now_s)

    def _after_loss(self, worker: Worker, how: str, now_s: float) -> None:
        """The others halt, decide and go on; the lost one may be started again."""
        if worker.place is None:
            return  # it was waiting for a place
        will_return = self._seat_one_that_waits() or self._replace(worker.hello.number, now_s)
        if self.generation == 0:
            if not will_return:
                self._fail(f"{worker} is lost before training began: {how}")
            return
        if worker.uid not in self._members:
            return  # it never was part of the generation
        self._num_fruitless = 0  # that is why channels broke
        if self._outage is None:
            self._outage = Outage(since_s=now_s)
        self._outage.lost.append(worker.place)
        if self._halting is None:
            self._halt(now_s, why=f"{worker} is lost: {how}")
        else:
            self._form_when_all_halted(now_s)

    def _seat_one_that_waits(self) -> bool:
        """Gives the lost worker's place to one that came when there was none."""
        worker = self.roster.seat_one_that_waits()
        if worker is None or worker.place is None:
            return False
        self._welcome(worker, worker.place)
        return True

    def _replace(self, number: int, now_s: float, *, again: bool = False) -> bool:
        """Whether a worker will be started in the place of a lost one."""
        wait_s = self.settings.replace_after_s
        if wait_s is None or self.roster.agent_of(number) is None:
            return False
        if not again and any(respawn.number == number for respawn in self._respawns):
            return True
        respawn = Respawn(number, now_s + wait_s, wait_s)
        self._respawns.append(respawn.later(now_s) if again else respawn)
        return True

    def _respawn_due(self, now_s: float) -> None:
        due = [respawn for respawn in self._respawns if respawn.due_s <= now_s]
        self._respawns = [respawn for respawn in self._respawns if respawn.due_s > now_s]
        for respawn in due:
            agent = self.roster.agent_of(respawn.number)
            place = self.shape.place(respawn.number)
            if agent is not None and self.roster.vacancies():
                self._send(agent, m.Spawn((m.Seat(respawn.number, str(place)),)))

    # Taking over from a coordinator that was lost.

    def _take_over(self, stock: Stock, now_s: float) -> None:
        """Puts the books where the last coordinator left them, then goes on as it would have."""
        if stock.is_deserted:
            self._end_deserted(stock)
            return
        self._adopt(stock, now_s)
        for uid, how in stock.gone.items():
            if self.outcome is None:
                self._gone(self.roster.workers[uid], how, now_s)
        is_settled = self._halting is None and self.generation == stock.generation
        if self.outcome is not None or not is_settled:
            return  # a loss has already set things going
        if stock.ending is not None:
            self._halt(now_s, why=stock.ending)
        else:
            self._go_on(stock, now_s)

    def _adopt(self, stock: Stock, now_s: float) -> None:
        self.generation, self.job = stock.generation, stock.job
        self.ledger = StepLedger(self.shape.stages, stock.open_step, dict(stock.reports))
        self._members = set(stock.members)
        self._step_began_s = self._first_step_s = now_s
        if stock.told.last_step == stock.open_step:
            self._told_step = stock.open_step
        self._has_finished = stock.has_all_steps and stock.told.has_finished
        fields = {"generation": self.generation, "open_step": stock.open_step}
        self._emit("took_over", **fields, workers=[str(w.place) for w in stock.here()])
        taken = {worker.place for worker in stock.workers}
        for worker in self.roster.here():  # they joined before it was known that others were here
            worker.finished_step = -1 if self.generation == 0 else None
            if worker.place in taken:
                worker.move(Happening.GONE)
                self._send(worker.uid, m.Stop(f"another worker holds its place, {worker.place}", 1))
        self.roster.workers |= {worker.uid: worker for worker in stock.workers}
        for uid, why in stock.fenced.items():
            self._send(uid, m.Stop(why, 1))
        for uid, hello in stock.agents.items():
            self._agent_hello(uid, hello, now_s)
        if stock.is_measured and len({p.stage for p in stock.profiles}) == self.shape.stages:
            self.plans.measure(stock.profiles)

    def _go_on(self, stock: Stock, now_s: float) -> None:
        """Nothing was under way but training itself."""
        waiting = [w for w in self.roster.placed().values() if w.state is State.STANDBY]
        if self.generation == 0:
            if len(waiting) == self.shape.num_workers:
                self._form(now_s, why="all workers are ready")
            return
        for uid in stock.behind:
            self._send(uid, m.Watermark(self.generation, stock.open_step - 1))
        if stock.has_all_steps:
            self._tell_when_finished(now_s)
            return
        self._close_step_when_done(now_s)
        if waiting:
            self._admit()

    def _end_deserted(self, stock: Stock) -> None:
        for uid, hello in stock.agents.items():
            self.roster.agents[uid] = AgentRecord(hello.host, hello.seats)
        if all(exited.code == 0 for agent in stock.agents.values() for exited in agent.ended):
            if stock.told.is_under_way:
                self._emit("finished", steps=stock.told.num_steps, seconds=0.0)
            self._end(Outcome(exit_code=0, why="finished"))
        else:
            self._fail("no worker is left of the job that another coordinator began")

    # Time.

    def _tick(self, now_s: float) -> None:
        self._respawn_due(now_s)
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
        if isinstance(event, Received) and isinstance(
            event.message, m.Hello | m.Rejoin | m.AgentHello
        ):
            self._send(event.uid, m.Stop(outcome.why, outcome.exit_code))

    def _send(self, uid: str, message: m.ToWorker | m.ToAgent) -> None:
        self._effects.append(Send(uid, message))

    def _emit(self, event: str, **fields: object) -> None:
        self._effects.append(Emit(event, fields))
