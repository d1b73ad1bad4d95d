"""What a coordinator that is started in the place of another makes of what workers tell it. Pure.

The last one may have died between any two messages, so some may have heard what others have not.
Whatever it told anybody rests on what all had told it: hence the newest generation and the highest
watermark that anybody has heard are in force, and those who have not heard of them catch up. Two
things cannot be caught up with inside a generation, its beginning and a change of its plan; then,
and when a Halt or a Boundary was under way, everybody halts and the next generation is formed.

Why the late ones can still join that: to train in a generation, all its members must meet. While
one has not heard of it, nobody has gone further than taking back, or again, the step it ended with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.facts import JobFacts, Member, RollBack, StageProfile
from everstep.membership.roster import Worker
from everstep.membership.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the events file says already, so that it is not said again."""

    last_step: int | None = None
    has_finished: bool = False

    @property
    def is_under_way(self) -> bool:
        return self.last_step is not None and not self.has_finished

    @property
    def num_steps(self) -> int:
        return 0 if self.last_step is None else self.last_step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """All that workers and agents told before the take-over was decided."""

    rejoins: Mapping[str, m.Rejoin]
    agents: Mapping[str, m.AgentHello]
    gone: Mapping[str, str]
    """How those who are known to be gone went, whether they had come back or not."""

    waited_s: float
    """For whoever has not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What the new coordinator goes on from."""

    generation: int
    job: JobFacts | None
    members: frozenset[str]
    workers: tuple[Worker, ...]
    gone: Mapping[str, str]
    """The uids among the workers that are not here any more, and how they went."""

    fenced: Mapping[str, str]
    """The uids of those who must leave, and why."""

    open_step: int
    reports: Mapping[WorkerId, m.StepDone]
    behind: frozenset[str]
    """Who has not heard that the step before the open one is closed."""

    ending: str | None
    """Why the generation cannot go on; None when it can."""

    profiles: Mapping[WorkerId, StageProfile]
    is_measured: bool
    """The profiles are all there are: nobody is measuring any more."""

    durable_step: int = -1
    agents: Mapping[str, m.AgentHello] = field(default_factory=dict)
    told: Told = field(default_factory=Told)

    @property
    def is_deserted(self) -> bool:
        """Agents were here and their workers have all ended."""
        is_running = any(agent.running for agent in self.agents.values())
        return bool(self.agents) and not self.workers and not is_running

    def here(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.uid not in self.gone]


def awaited(heard: Heard) -> set[str]:
    """The uids that the take-over should wait for."""
    return (
        {member.uid for member in _members(heard.rejoins.values())}
        - set(heard.rejoins)
        - set(heard.gone)
    )


def take_stock(heard: Heard, *, now_s: float, told: Told) -> Stock:
    """Decides what is in force, who is in it and whether it can go on."""
    members = _members(heard.rejoins.values())
    generation = max((r.generation for r in heard.rejoins.values()), default=0)
    uids = frozenset(member.uid for member in members)
    fenced = _fenced(heard, generation=generation, members=uids)
    ours = {uid: rejoin for uid, rejoin in heard.rejoins.items() if uid not in fenced}
    current = [rejoin for uid, rejoin in ours.items() if rejoin.generation == generation > 0]
    open_step = 1 + max((rejoin.watermark for rejoin in ours.values()), default=-1)
    job = next((rejoin.job for rejoin in ours.values() if rejoin.job is not None), None)
    ending = _ending(current, ours, uids)
    redo = next((rejoin.redo for rejoin in current if rejoin.redo is not None), None)
    restore = next((rejoin.restore for rejoin in current if rejoin.restore is not None), None)
    is_measured = not any(rejoin.is_measuring for rejoin in current)
    returned = [
        _returned(
            rejoin,
            generation=generation,
            is_first=generation == 0 or (generation == 1 and uid in uids),
            redo=redo,
            restore=restore,
            now_s=now_s,
        )
        for uid, rejoin in ours.items()
    ]
    for worker in returned:
        rejoin = ours[worker.uid]
        if not is_measured and not rejoin.is_measuring:
            worker.profile = rejoin.profile
    is_done = job is not None and open_step >= job.steps and ending is None
    missing = [
        _missing(member, now_s=now_s, has_finished=is_done)
        for member in members
        if member.uid not in ours
    ]
    return Stock(
        generation=generation,
        job=job,
        members=uids,
        workers=(*returned, *missing),
        gone={worker.uid: _how(worker.uid, heard) for worker in missing}
        | {uid: how for uid, how in heard.gone.items() if uid in ours},
        fenced=fenced,
        open_step=open_step,
        reports={
            rejoin.place: rejoin.report
            for rejoin in ours.values()
            if rejoin.report is not None and rejoin.report.step == open_step
        },
        behind=frozenset(r.uid for r in current if r.watermark < open_step - 1),
        ending=ending,
        profiles={r.place: r.profile for r in current if r.profile is not None},
        is_measured=is_measured,
        durable_step=max((rejoin.durable for rejoin in current), default=-1),
        agents=heard.agents,
        told=told,
    )


def _members(rejoins: Iterable[m.Rejoin]) -> tuple[Member, ...]:
    """Of the newest generation, as most of those who are in it know it.

    They can differ when a coordinator died after it had told somebody of a generation, and the next
    gave that one up and formed another of the same number.
    """
    rejoins = list(rejoins)
    newest = max((rejoin.generation for rejoin in rejoins), default=0)
    votes = Counter(rejoin.members for rejoin in rejoins if rejoin.generation == newest)
    return votes.most_common(1)[0][0] if votes else ()


def _fenced(heard: Heard, *, generation: int, members: frozenset[str]) -> dict[str, str]:
    fenced: dict[str, str] = {}
    taken = {r.place for uid, r in heard.rejoins.items() if uid in members - set(heard.gone)}
    for uid, rejoin in heard.rejoins.items():
        if uid in members:
            continue
        if rejoin.generation > 0:
            was = rejoin.generation
            fenced[uid] = f"generation {generation} trains without it; it was in {was}"
        elif rejoin.place in taken:
            # It was let in by a coordinator that had not yet heard of the other.
            fenced[uid] = f"another worker holds its place, {rejoin.place}"
        else:
            taken.add(rejoin.place)
    return fenced


def _ending(
    current: list[m.Rejoin], ours: Mapping[str, m.Rejoin], members: frozenset[str]
) -> str | None:
    for rejoin in current:
        if rejoin.ending is not None:
            return f"under way when the coordinator was lost: {rejoin.ending}"
    late = [uid for uid, rejoin in ours.items() if uid in members and rejoin not in current]
    if late:
        return f"the last coordinator was lost before it had told {len(late)} of the generation"
    if len({rejoin.replanned_from for rejoin in current}) > 1:
        return "the last coordinator was lost before it had told everybody of a new plan"
    return None


def _returned(
    rejoin: m.Rejoin,
    *,
    generation: int,
    is_first: bool,
    redo: RollBack | None,
    restore: int | None,
    now_s: float,
) -> Worker:
    worker = Worker(rejoin.hello, rejoin.place, now_s)
    worker.job, worker.saved = rejoin.job, rejoin.saved
    worker.finished_step = rejoin.finished_step
    worker.is_copying = rejoin.is_copying
    worker.operations = rejoin.operations
    worker.is_operating = rejoin.is_operating
    worker.logged = rejoin.logged
    if rejoin.generation == 0 and is_first:
        # What it has built, or will load, is the state that all begin with.
        worker.finished_step = -1 if restore is None else restore
        worker.owed_restore = restore
    worker.state = _state(rejoin, generation)
    if rejoin.generation < generation and redo is not None:
        worker.owed_redo = redo if rejoin.finished_step == redo.step else None
    return worker


def _state(rejoin: m.Rejoin, generation: int) -> State:
    if rejoin.job is None:
        return State.JOINING
    if rejoin.generation < max(1, generation) or rejoin.is_halted:
        return State.STANDBY
    return State.FINISHED if rejoin.has_finished else State.TRAINING


def _missing(member: Member, *, now_s: float, has_finished: bool) -> Worker:
    """When all steps are done, whoever is missing may well have left as it should."""
    host = member.data_address.rpartition(":")[0]
    hello = m.Hello(
        uid=member.uid,
        number=member.number,
        pid=member.pid,
        host=host,
        data_address=member.data_address,
    )
    worker = Worker(hello, WorkerId(member.replica, member.stage), now_s)
    worker.state = State.FINISHED if has_finished else State.TRAINING
    return worker


def _how(uid: str, heard: Heard) -> str:
    return heard.gone.get(uid, f"it did not come back within {heard.waited_s:.1f} s")
