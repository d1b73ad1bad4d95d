"""Takes the place of a coordinator that was lost: puts the books where it left them, and goes on.

Pure. What it left behind is worked out in takeover.py, from what workers and agents tell.
"""

from __future__ import annotations

from everstep.membership import messages as m
from everstep.membership.attendance import Attendance
from everstep.membership.books import Books
from everstep.membership.generations import Generations
from everstep.membership.ledger import StepLedger
from everstep.membership.roster import AgentRecord
from everstep.membership.states import Happening, State
from everstep.membership.takeover import Stock
from everstep.membership.traffic import Outcome


class Inheritance:
    def __init__(self, books: Books, attendance: Attendance, generations: Generations) -> None:
        self._books = books
        self._attendance = attendance
        self._generations = generations

    def accept(self, stock: Stock, now_s: float) -> None:
        """Once, before any generation is formed."""
        books = self._books
        if stock.is_deserted:
            self._close_down(stock)
            return
        self._write_down(stock, now_s)
        self._turn_away(stock)
        books.roster.workers |= {worker.uid: worker for worker in stock.workers}
        for uid, hello in stock.agents.items():
            self._attendance.agent_hello(uid, hello, now_s)
        for uid, how in stock.gone.items():
            if books.outcome is None:
                self._attendance.gone(books.roster.workers[uid], how, now_s)
        is_settled = books.halting is None and books.generation == stock.generation
        if books.outcome is not None or not is_settled:
            return  # a loss has already set things going
        if stock.ending is not None:
            self._generations.halt(now_s, why=stock.ending)
        else:
            self._go_on(stock, now_s)

    def _write_down(self, stock: Stock, now_s: float) -> None:
        books, told = self._books, stock.told
        books.generation, books.job = stock.generation, stock.job
        books.members = set(stock.members)
        books.ledger = StepLedger(books.shape.stages, stock.open_step, dict(stock.reports))
        books.told_step = -1 if told.last_step is None else told.last_step
        books.is_beginning = stock.generation == 0
        books.durable_step = stock.durable_step
        if stock.is_measured and len({p.stage for p in stock.profiles}) == books.shape.stages:
            books.plans.measure(stock.profiles)
        has_finished = books.has_all_steps() and told.has_finished
        self._attendance.inherit(has_finished=has_finished, now_s=now_s)
        self._generations.inherit(now_s=now_s)
        places = [str(worker.place) for worker in stock.here()]
        fields = {"generation": stock.generation, "open_step": stock.open_step}
        books.emit("took_over", **fields, workers=places)

    def _turn_away(self, stock: Stock) -> None:
        """Whoever was declared lost, or joined before it was known that others hold its place."""
        books = self._books
        for uid, why in stock.fenced.items():
            books.send(uid, m.Stop(why, 1))
        taken = {worker.place for worker in stock.workers}
        for worker in books.roster.here():
            worker.finished_step = -1 if books.is_beginning else None
            if worker.place in taken:
                worker.move(Happening.GONE)
                why = f"another worker holds its place, {worker.place}"
                books.send(worker.uid, m.Stop(why, 1))

    def _go_on(self, stock: Stock, now_s: float) -> None:
        """Nothing was under way but training itself."""
        books = self._books
        waiting = [w for w in books.roster.placed().values() if w.state is State.STANDBY]
        if books.is_beginning:
            if len(waiting) == books.num_awaited:
                self._generations.form(now_s, why="all workers are ready")
            return
        for uid in stock.behind:
            books.send(uid, m.Watermark(books.generation, stock.open_step - 1))
        if books.has_all_steps():
            self._attendance.tell_when_finished(now_s)
            return
        self._generations.close_step_when_done(now_s)
        if waiting:
            self._generations.admit()

    def _close_down(self, stock: Stock) -> None:
        """Its workers have all ended, and nobody is left but the agents that tell so."""
        books = self._books
        for uid, hello in stock.agents.items():
            books.roster.agents[uid] = AgentRecord(hello.host, hello.seats)
        if any(exited.code != 0 for agent in stock.agents.values() for exited in agent.ended):
            books.fail("no worker is left of the job that another coordinator began")
            return
        if stock.told.is_under_way:
            books.emit("finished", steps=stock.told.num_steps, seconds=0.0)
        books.end(Outcome(exit_code=0, why="finished"))
