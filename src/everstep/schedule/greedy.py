"""The list scheduler: every idle worker takes the most urgent thing it may do.

Fast enough for failure time (a thousand workers in a fraction of a second) and the evaluation
inside the improver. Invariant: on every channel, what was sent first is used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from everstep.schedule.routing import Routes
from everstep.schedule.workload import B, F, Timetable, W, Workload

Priorities = list[float]
"""Per operation; smaller is more urgent. Kinds are compared with each other, too."""

B_FIRST, F_FIRST = float("-inf"), float("inf")

PATIENCE_FRACTION = 0.25
"""Of an action's duration: rather than start it, a worker waits so long for something more urgent
that is on its way. Without it, a B that comes a hair too late finds a W just started."""

_NEAREST = 4
"""How many of the things on their way are looked at; the heap has the very next one first."""

_NOTHING = (float("inf"), 0, 0)


def priorities(
    work: Workload,
    *,
    leads: Sequence[float] | None = None,
    routes: Routes | None = None,
    yielding: float = 0.0,
) -> Priorities:
    """The plain rule is B, then F, then W as filler.

    Args:
        leads: per stage, by how many micro-batches F may run ahead of B: F of micro-batch m goes
            before B of micro-batch k while m < k + lead. The plain rule is a lead below any
            micro-batch; one above any puts F first.
        yielding: by how many micro-batches a worker puts F of what it has adopted (see `routes`)
            behind its own; before its own when negative.
    """
    leads = leads or [B_FIRST] * work.stages
    num_jobs = work.num_jobs
    # A lone stage has nobody to wait for: W at once holds one micro-batch instead of all.
    filler = 3 * num_jobs if work.stages > 1 else 0
    urgency: list[float] = []
    for job in range(num_jobs):
        replica, microbatch = divmod(job, work.microbatches)
        # Micro-batch by micro-batch, so that all replicas progress alike.
        turn = microbatch * work.replicas + replica
        for stage, lead in enumerate(leads):
            ahead = min(max(lead * work.replicas, -num_jobs), num_jobs)
            is_adopted = routes is not None and routes[stage][job] != replica
            forward = turn + yielding * work.replicas if is_adopted else turn
            urgency += (forward, turn + ahead, turn + filler)
    return urgency


def list_schedule(work: Workload, routes: Routes, priority: Priorities) -> Timetable:
    """Runs all operations on virtual workers. See `_pick` for what an idle worker does next."""
    run = _Run(work, routes, priority)
    return Timetable(routes, run.starts, run.order)


class _Agenda(dict[int, list[int]]):
    """Things that will happen, by time: an operation that ends, or ~operation that arrives. What is
    sent first arrives first even when sending takes no time."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def __missing__(self, time: int) -> list[int]:
        heappush(self.times, time)
        self[time] = []
        return self[time]


class _Run:
    """One pass of the list scheduler over virtual time. The improver lives on how fast this is."""

    def __init__(self, work: Workload, routes: Routes, priority: Priorities) -> None:
        num_workers = work.replicas * work.stages
        self.work = work
        self.priority = priority
        self.starts = [-1] * (work.num_jobs * work.stages * 3)
        self.order: list[int] = []
        # By worker, how long it is busy with each kind.
        self.durations = [
            (work.forward[stage], work.gradient_delay(stage), work.weight_gradient[stage])
            for stage in range(work.stages)
            for _ in range(work.replicas)
        ]
        # Times are whole ticks: within less than one of them nothing can be on its way.
        self.is_patient = max(map(max, self.durations)) * PATIENCE_FRACTION >= 1
        # By job and stage, as operations are numbered.
        self.worker: list[int] = [
            stage * work.replicas + replica
            for places in zip(*routes, strict=True)
            for stage, replica in enumerate(places)
        ]
        self.room = [work.limit[worker // work.replicas] for worker in range(num_workers)]
        self.is_busy = [False] * num_workers
        # Ready operations per worker and kind: heaps of (urgency, arrival, operation).
        self.ready: list[list[list[tuple[float, int, int]]]] = [
            [[], [], []] for _ in range(num_workers)
        ]
        # By sender and receiver in one number.
        self.last_urgency: dict[int, float] = {}
        # What others are working on for a worker: heaps of (arrival time, urgency, kind).
        self.coming: list[list[tuple[int, float, int]]] = [[] for _ in range(num_workers)]
        self.num_arrived = 0
        self.agenda = _Agenda()
        self._run()

    def _run(self) -> None:
        for first in range(0, len(self.starts), self.work.stages * 3):
            self._make_ready(self.worker[first // 3], first, self.priority[first])
        now, touched = 0, set(range(len(self.is_busy)))
        agenda, is_busy = self.agenda, self.is_busy
        pick, finish, receive = self._pick, self._finish, self._receive
        while True:
            for worker in touched:
                if not is_busy[worker]:
                    pick(worker, now)
            if not agenda:
                return
            # Everything that happens now, arrivals that follow from it too, is seen before anyone
            # chooses.
            now = heappop(agenda.times)
            touched = {
                finish(event, now) if event >= 0 else receive(~event) for event in agenda[now]
            }
            del agenda[now]

    def _pick(self, worker: int, now: int) -> None:
        """Starts the most urgent ready operation of an idle worker, if there is one.

        F needs room under the in-flight limit. When only room is missing, the W that would give
        it inherits the urgency of the F that waits for it.
        """
        forwards, gradients, weights = ready = self.ready[worker]
        forward = forwards[0] if forwards else _NOTHING
        gradient = gradients[0] if gradients else _NOTHING
        weight = weights[0] if weights else _NOTHING
        if forwards and not self.room[worker]:
            weight = min(weight, forward) if weights else _NOTHING
            forward = _NOTHING
        if forward < gradient and forward <= weight:
            kind, urgency = F, forward[0]
        elif gradient <= weight:
            kind, urgency = B, gradient[0]
        else:
            kind, urgency = W, weight[0]
        if not ready[kind]:
            return
        duration = self.durations[worker][kind]
        if self.is_patient and self._is_worth_waiting(worker, urgency, now=now, duration=duration):
            return
        self._start(heappop(ready[kind])[2], worker, now, now + duration)

    def _is_worth_waiting(self, worker: int, urgency: float, *, now: int, duration: int) -> bool:
        """Whether something more urgent arrives soon; its arrival makes the worker pick again."""
        coming = self.coming[worker]
        while coming and coming[0][0] <= now:
            heappop(coming)
        latest = now + duration * PATIENCE_FRACTION
        return any(
            at <= latest and other < urgency and (kind != F or self.room[worker])
            for at, other, kind in coming[:_NEAREST]
        )

    def _start(self, operation: int, worker: int, now: int, end: int) -> None:
        self.is_busy[worker] = True
        self.starts[operation] = now
        self.order.append(operation)
        kind = operation % 3
        if kind == F:
            self.room[worker] -= 1
        elif kind == B and self.work.is_glued:
            stage = worker // self.work.replicas
            self.starts[operation + 1] = now + self.work.input_gradient[stage]
            self.order.append(operation + 1)
        self.agenda[end].append(operation)
        if self.is_patient:
            self._foretell(operation, end + self.work.transfer)

    def _foretell(self, operation: int, arrival: int) -> None:
        """Lets the worker that the result goes to know when it will come."""
        place, kind = divmod(operation, 3)
        stage = place % self.work.stages
        step = 1 if kind == F else -1
        if kind == W or not 0 <= stage + step < self.work.stages:
            return
        urgency = self.priority[operation + 3 * step]
        heappush(self.coming[self.worker[place + step]], (arrival, urgency, kind))

    def _finish(self, operation: int, now: int) -> int:
        """Handles the end of an operation; returns the worker that is free now."""
        place, kind = divmod(operation, 3)
        worker = self.worker[place]
        self.is_busy[worker] = False
        if kind == F:
            if worker < len(self.is_busy) - self.work.replicas:
                self.agenda[now + self.work.transfer].append(~(operation + 3))
            else:
                self._make_ready(worker, operation + 1, self.priority[operation + 1])
        elif kind == W:
            self.room[worker] += 1
        else:
            if self.work.is_glued:
                self.room[worker] += 1
            else:
                self._make_ready(worker, operation + 1, self.priority[operation + 1])
            if worker >= self.work.replicas:
                self.agenda[now + self.work.transfer].append(~(operation - 3))
        return worker

    def _receive(self, operation: int) -> int:
        """Handles the arrival of what an operation needs; returns its worker. An arrival is never
        more urgent than what came through the same channel before it."""
        place, kind = divmod(operation, 3)
        worker, sender = self.worker[place], self.worker[place - 1 if kind == F else place + 1]
        channel = sender * len(self.is_busy) + worker
        urgency = self.priority[operation]
        if urgency < self.last_urgency.get(channel, B_FIRST):
            urgency = self.last_urgency[channel]
        else:
            self.last_urgency[channel] = urgency
        self._make_ready(worker, operation, urgency)
        return worker

    def _make_ready(self, worker: int, operation: int, urgency: float) -> None:
        self.num_arrived += 1
        heappush(self.ready[worker][operation % 3], (urgency, self.num_arrived, operation))
