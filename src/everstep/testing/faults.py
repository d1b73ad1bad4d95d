"""Faults on purpose: workers that are killed, frozen, slowed down or cut off. For demos, tests and
drills.

everstep run --kill 1:2@40 ...      kill -9 of worker 1:2 while step 40 is under way

From inside a worker's script, at named points of the protocol (`everstep.core.points`):

    script = FaultScript.parse("kill 1:2 after-optimizer@7; freeze 0:1 before-send@3#2 for 6")
    faults.install(script, log=folder / "faults.log")
    run = everstep.train(...)

`@7` is the first passing in step 7 or later, `#2` the second. Every fault happens once in a job,
even when the worker's replacement passes the same point: the log, which all workers share,
remembers. It is written before a fault acts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from everstep.core import points
from everstep.core.errors import ConfigError, PeerLost
from everstep.core.events import Event
from everstep.core.ids import WorkerId
from everstep.core.points import Point

IN_EVERY_STEP = (
    Point.BEFORE_RECEIVE,
    Point.AFTER_RECEIVE,
    Point.BEFORE_SEND,
    Point.AFTER_SEND,
    Point.BEFORE_REDUCTION,
    Point.IN_REDUCTION,
    Point.AFTER_REDUCTION,
    Point.BEFORE_OPTIMIZER,
    Point.AFTER_OPTIMIZER,
)
"""What each worker of two or more stages passes in each step, some of it several times."""

_FAULT = re.compile(
    r"(?P<what>kill|break|freeze|slow) (?P<place>\d+:\d+) (?P<point>[a-z-]+)@(?P<step>\d+)"
    r"(#(?P<occurrence>[1-9]\d*))?( for (?P<seconds>\d+(\.\d+)?))?"
)


@dataclass(frozen=True, slots=True)
class Moment:
    """The `occurrence`-th time that a worker passes a point in `step` or later."""

    place: WorkerId
    point: Point
    step: int
    occurrence: int = 1

    def __str__(self) -> str:
        again = "" if self.occurrence == 1 else f"#{self.occurrence}"
        return f"{self.place} {self.point}@{self.step}{again}"


@dataclass(frozen=True, slots=True)
class Kill:
    """As `kill -9` does."""

    at: Moment

    def __str__(self) -> str:
        return f"kill {self.at}"

    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Freeze:
    """The whole process stands still, heartbeats too, and then goes on as if nothing had been."""

    at: Moment
    seconds: float

    def __str__(self) -> str:
        return f"freeze {self.at} for {self.seconds:g}"

    def act(self) -> None:
        # Somebody else must wake it up. Of the same process group, so it ends with the worker.
        wake = f"sleep {self.seconds}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["/bin/sh", "-c", wake]):
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Slow:
    """The training thread takes a while; the others of the process go on."""

    at: Moment
    seconds: float

    def __str__(self) -> str:
        return f"slow {self.at} for {self.seconds:g}"

    def act(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Break:
    """The worker finds a connection broken, though everybody is alive."""

    at: Moment

    def __str__(self) -> str:
        return f"break {self.at}"

    def act(self) -> None:
        raise PeerLost([], during=str(self.at.point), cause="the fault script says so")


Fault: TypeAlias = Kill | Freeze | Slow | Break


@dataclass(frozen=True, slots=True)
class FaultScript:
    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FaultScript:
        """Reads what `str` writes: faults with a semicolon between them."""
        parts = (" ".join(part.split()) for part in text.split(";"))
        return cls(tuple(_parse_fault(part) for part in parts if part))

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))


def _parse_fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    is_timed = match is not None and match["seconds"] is not None
    if match is None or is_timed == (match["what"] in ("kill", "break")):
        rule = "must be like `kill 1:2 after-send@7` or `freeze 1:2 after-send@7#2 for 6`"
        raise ConfigError("fault", text, rule)
    if match["point"] not in list(Point):
        raise ConfigError("fault", text, f"the points are {', '.join(Point)}")
    at = Moment(
        WorkerId.parse(match["place"], field="fault"),
        Point(match["point"]),
        int(match["step"]),
        int(match["occurrence"] or 1),
    )
    match match["what"]:
        case "kill":
            return Kill(at)
        case "break":
            return Break(at)
        case "freeze":
            return Freeze(at, float(match["seconds"]))
        case _:
            return Slow(at, float(match["seconds"]))


def random_kills(
    seed: int,
    *,
    replicas: int,
    stages: int,
    steps: int,
    number: int,
    among: Sequence[Point] = IN_EVERY_STEP,
) -> FaultScript:
    """So many kills at points within steps, each of another worker; every stage keeps one."""
    if number > (replicas - 1) * stages:
        rule = f"must be at most {(replicas - 1) * stages}, so that every stage keeps a worker"
        raise ConfigError("number", number, rule)
    chance = random.Random(seed)
    places = [WorkerId(r, s) for r in range(replicas) for s in range(stages)]
    spared = {WorkerId(chance.randrange(replicas), stage) for stage in range(stages)}
    victims = chance.sample([place for place in places if place not in spared], number)
    when = sorted(chance.sample(range(1, steps - 1), number))
    kills = [
        Kill(Moment(victim, chance.choice(among), step, chance.randint(1, 2)))
        for victim, step in zip(victims, when, strict=True)
    ]
    return FaultScript(tuple(kills))


class _Watch:
    """Counts what this process passes and plays what is due."""

    def __init__(self, script: FaultScript, log: Path) -> None:
        self._log = log
        played = played_faults(log)
        self._waiting = [(n, fault) for n, fault in enumerate(script.faults) if n not in played]
        self._passings: Counter[int] = Counter()

    def pass_by(self, place: WorkerId, point: Point, step: int) -> None:
        for number, fault in list(self._waiting):
            at = fault.at
            if at.place != place or at.point is not point or step < at.step:
                continue
            self._passings[number] += 1
            if self._passings[number] == at.occurrence:
                self._waiting.remove((number, fault))
                self._note(number, fault, step)
                fault.act()

    def _note(self, number: int, fault: Fault, step: int) -> None:
        line = f"{number} step {step} pid {os.getpid()}: {fault}\n"
        # One write, at the end of the file: workers may write at the same time.
        with self._log.open("ab", buffering=0) as file:
            file.write(line.encode())


def install(script: FaultScript, *, log: Path) -> None:
    """Plays the script's faults in this worker. To be called before `everstep.train`."""
    points.watch(_Watch(script, log).pass_by)


def played_faults(log: Path) -> set[int]:
    """The numbers of the script's faults that have happened, from 0."""
    lines: Iterable[str] = log.read_text().splitlines() if log.exists() else ()
    return {int(line.split()[0]) for line in lines}


@dataclass(frozen=True, slots=True)
class KillAt:
    place: WorkerId
    step: int

    @classmethod
    def parse(cls, text: str, *, field: str) -> KillAt:
        match = re.fullmatch(r"(\d+:\d+)@(\d+)", text.strip())
        if match is None:
            raise ConfigError(field, text, "must be REPLICA:STAGE@STEP, such as 1:2@40")
        return cls(WorkerId.parse(match[1], field=field), int(match[2]))


class Killer:
    """Subscribed to the events of a job on this machine; knows its workers' processes from them."""

    def __init__(self, kills: Sequence[KillAt]) -> None:
        self._kills = list(kills)
        self._pids: dict[WorkerId, int] = {}

    def note(self, event: Event) -> None:
        match event:
            case {"event": "worker_joined", "replica": int(r), "stage": int(s), "pid": int(pid)}:
                self._pids[WorkerId(r, s)] = pid
            case {"event": "generation", "number": 1}:
                self._kill(during_step=0)
            case {"event": "step", "step": int(step)}:
                self._kill(during_step=step + 1)
            case _:
                pass

    def _kill(self, *, during_step: int) -> None:
        due = [kill for kill in self._kills if kill.step <= during_step]
        self._kills = [kill for kill in self._kills if kill.step > during_step]
        for kill in due:
            with suppress(ProcessLookupError):
                os.kill(self._pids[kill.place], signal.SIGKILL)
