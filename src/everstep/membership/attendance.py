"""Who comes and who goes: joining, falling silent, being lost, being replaced, leaving.

Pure. Tells `Generations` of it, which decides what that means for those who train. Invariant: a
worker that was declared lost or has left is never taken back; it can only join as new.
"""

from __future__ import annotations

from everstep.core.errors import ConfigError
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.books import Books
from everstep.membership.exits import describe_exit
from everstep.membership.generations import Generations
from everstep.membership.regrouping import Outage
from everstep.membership.replacing import Replacements
from everstep.membership.roster import AgentRecord, Worker
from everstep.membership.silence import GiveUp, Suspect, Trust, judge
from everstep.membership.states import Happening, State
from everstep.membership.traffic import Outcome
from everstep.membership.wording import differences, who


class Attendance:
    def __init__(self, books: Books, generations: Generations, replacements: Replacements) -> None:
        self._books = books
        self._generations = generations
        self._replacements = replacements
        self._has_finished = False
        self._first_step_s = 0.0
        self._ticked_s: float | None = None

    def inherit(self, *, has_finished: bool, now_s: float) -> None:
        """Another coordinator was here first, and may have told that all is done."""
        self._has_finished = has_finished
        self._first_step_s = now_s

    # Joining.

    def agent_hello(self, uid: str, hello: m.AgentHello, now_s: float) -> None:
        books = self._books
        is_new = not hello.seats
        seats = books.roster.seats_for(offered=hello.workers) if is_new else hello.seats
        books.roster.agents[uid] = AgentRecord(hello.host, seats)
        started = len(seats) if is_new else 0
        books.emit("agent_joined", host=hello.host, offered=hello.workers, started=started)
        if started:
            books.send(uid, m.Spawn(seats))
        if not books.has_all_steps():
            for number in hello.empty_seats():
                self._fill_seat(number, now_s)

    def _fill_seat(self, number: int, now_s: float) -> None:
        """The agent's worker ended when there was no coordinator to tell."""
        if not self._replacements.plan(number, now_s) and self._books.is_beginning:
            self._books.fail(f"worker number {number} is lost before training began")

    def greeted(self, uid: str, greeting: m.Hello | m.Rejoin, now_s: float) -> None:
        if isinstance(greeting, m.Rejoin):
            self._rejoin(uid, greeting, now_s)
        else:
            self._hello(uid, greeting, now_s)

    def _rejoin(self, uid: str, rejoin: m.Rejoin, now_s: float) -> None:
        """Too late for the take-over: only one that never trained is still of use."""
        books = self._books
        is_known = uid in books.roster.workers
        if is_known or rejoin.generation > 0 or rejoin.place in books.roster.placed():
            books.send(uid, m.Stop("the others have gone on without it", 1))
            return
        worker = Worker(rejoin.hello, rejoin.place, now_s)
        worker.finished_step = -1 if books.is_beginning else None
        books.roster.workers[uid] = worker
        if rejoin.job is not None:
            self.ready(worker, m.Ready(rejoin.job, rejoin.saved), now_s)

    def _hello(self, uid: str, hello: m.Hello, now_s: float) -> None:
        books = self._books
        if uid in books.roster.workers:
            books.send(uid, m.Stop(f"the uid {uid} has been used: a worker joins once", 1))
            return
        self._replacements.joined(hello.number)
        worker = books.roster.add(hello, now_s=now_s)
        if worker.place is not None:
            self._welcome(worker, worker.place)

    def _welcome(self, worker: Worker, place: WorkerId) -> None:
        books = self._books
        worker.finished_step = -1 if books.is_beginning else None
        books.emit("worker_joined", **who(worker), host=worker.hello.host)
        welcome = m.Welcome(
            replica=place.replica,
            stage=place.stage,
            replicas=books.shape.replicas,
            stages=books.shape.stages,
            is_beginning=books.is_beginning,
        )
        books.send(worker.uid, welcome)

    def ready(self, worker: Worker, message: m.Ready, now_s: float) -> None:
        books, job = self._books, message.job
        worker.move(Happening.READY)
        worker.job, worker.saved = job, message.saved
        books.job = books.job or job
        if job != books.job:
            raise ConfigError(
                "job", worker, f"must be the same on all workers: {differences(job, books.job)}"
            )
        waiting = [w for w in books.roster.placed().values() if w.state is State.STANDBY]
        if not books.is_beginning:
            self._generations.admit()
            self._generations.look_again(now_s)
        elif len(waiting) == books.num_awaited:
            if books.generation == 0:
                self._first_step_s = now_s
            self._generations.form(now_s, why="all workers are ready")

    # Leaving.

    def finished(self, worker: Worker, now_s: float) -> None:
        worker.move(Happening.DONE)
        self.tell_when_finished(now_s)

    def tell_when_finished(self, now_s: float) -> None:
        books = self._books
        members = books.members_here().values()
        if not self._has_finished and all(w.state is State.FINISHED for w in members):
            self._has_finished = True
            seconds = now_s - self._first_step_s
            books.emit("finished", steps=books.ledger.open_step, seconds=seconds)

    def user_failure(self, worker: Worker, failure: m.Failed) -> None:
        why = f"{worker} raised at {failure.where}"
        fields = {"where": failure.where, "traceback": failure.traceback}
        self._books.emit("failed", why=why, **who(worker), **fields)
        self._books.end(Outcome(exit_code=1, why=why, traceback=failure.traceback))

    def worker_exited(self, message: m.WorkerExited, now_s: float) -> None:
        books = self._books
        how = describe_exit(message.code)
        worker = books.roster.workers.get(message.uid)
        if worker is None and not books.is_beginning:
            books.emit("replacement_failed", number=message.number, how=how)
            self._replacements.failed(message.number, now_s)
        elif worker is None:
            books.fail(
                f"worker number {message.number} (pid {message.pid}) ended before it joined:"
                f" {how}; does the script call everstep.train?"
            )
        elif worker.is_here:
            self.gone(worker, how, now_s)

    def disconnected(self, uid: str, now_s: float) -> None:
        worker = self._books.roster.workers.get(uid)
        agent = self._books.roster.agents.get(uid)
        if worker is not None and worker.is_here:
            self.gone(worker, "its connection closed", now_s)
        elif agent is not None and agent.is_here:
            self._agent_gone(agent)

    def _agent_gone(self, agent: AgentRecord) -> None:
        agent.is_here = False
        self._books.emit("agent_lost", host=agent.host)
        missing = list(self._books.roster.unjoined(agent))
        if missing and self._books.is_beginning:
            self._books.fail(f"the agent on {agent.host} left before workers {missing} joined")

    def gone(self, worker: Worker, how: str, now_s: float) -> None:
        books = self._books
        worker.move(Happening.GONE)
        if worker.state is State.LOST:
            books.emit("worker_lost", **who(worker), how=how)
            self._after_loss(worker, how, now_s)
        elif not books.members_here():
            # Whoever waits to join has come too late.
            self.tell_when_finished(now_s)
            books.end(Outcome(exit_code=0, why="finished"))
        elif books.halting is not None:
            self._generations.form_when_all_halted(now_s)

    def _after_loss(self, worker: Worker, how: str, now_s: float) -> None:
        """The others halt, decide and go on; the lost one may be started again."""
        if worker.place is None:
            return  # it was waiting for a place
        will_return = self._seat_one_that_waits() or self._replacements.plan(
            worker.hello.number, now_s
        )
        if self._books.is_beginning:
            if not will_return:
                self._books.fail(f"{worker} is lost before training began: {how}")
        elif worker.uid in self._books.members:
            self._regroup(worker, worker.place, how, now_s)

    def _seat_one_that_waits(self) -> bool:
        """Gives the lost worker's place to one that came when there was none."""
        worker = self._books.roster.seat_one_that_waits()
        if worker is None or worker.place is None:
            return False
        self._welcome(worker, worker.place)
        return True

    def _regroup(self, worker: Worker, place: WorkerId, how: str, now_s: float) -> None:
        books = self._books
        books.num_fruitless = 0  # that is why channels broke
        if books.outage is None:
            books.outage = Outage(since_s=now_s)
        books.outage.lost.append(place)
        if books.has_all_steps() and not books.members_here():
            self.tell_when_finished(now_s)
        if books.halting is None:
            self._generations.halt(now_s, why=f"{worker} is lost: {how}")
        else:
            self._generations.form_when_all_halted(now_s)

    def move(self, worker: Worker, to: WorkerId, why: str, now_s: float) -> None:
        """Its process ends, and another takes the new place: nothing is lost, and nobody."""
        books = self._books
        books.emit("moving", **who(worker), to=str(to), reason=why)
        books.roster.reserved[worker.hello.number] = to
        worker.move(Happening.GONE)
        self._replacements.move(worker.hello.number, now_s)
        books.send(worker.uid, m.Stop(f"it moves to {to}", 0))
        self._generations.halt(now_s, why=f"{worker} moves to {to}")

    # Time.

    def tick(self, now_s: float) -> None:
        books = self._books
        self._replacements.start_due(now_s)
        self._generations.look_again(now_s)
        gap_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        for worker in books.roster.here():
            if gap_s > books.settings.patience.tick_gap_s:
                worker.heard_s += gap_s
            if books.outcome is None:
                self._check_silence(worker, now_s)

    def _check_silence(self, worker: Worker, now_s: float) -> None:
        halting = self._books.halting
        verdict = judge(
            worker.state,
            silent_s=now_s - worker.heard_s,
            halting_s=None if halting is None else now_s - halting.since_s,
            patience=self._books.settings.patience,
        )
        match verdict:
            case GiveUp(how):
                self.gone(worker, how, now_s)
            case Suspect():
                worker.move(Happening.SILENT)
            case Trust():
                pass

    def heard(self, worker: Worker, now_s: float) -> None:
        worker.heard_s = now_s
        if worker.state is State.SUSPECTED:
            worker.move(Happening.HEARD)
