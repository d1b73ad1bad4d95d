"""The plan store: plans made ahead, in memory and on disk, so that a loss finds its plan ready.

Replicas are interchangeable, so losses that differ only in the names of replicas share one plan:
two losses in 32 x 8 workers are 32,640 questions and 64 answers. A file that cannot be read or no
longer passes the checker is planned again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import msgspec

from everstep.core.errors import EverstepError
from everstep.core.ids import WorkerId
from everstep.schedule.documents import plan_from_json, plan_to_json, problem_to_json
from everstep.schedule.plan import Channel, Plan
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem

Renaming = tuple[int, ...]
"""`renaming[r]` is the new name of replica r."""


class PlanStore:
    def __init__(self, directory: Path | None = None, *, effort: Effort | None = None) -> None:
        self._directory = directory
        self._effort = effort
        self._plans: dict[Problem, Plan] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def plan(self, problem: Problem) -> Plan:
        """The plan for exactly this problem, made now if nobody prepared it."""
        renamed, renaming = canonical(problem)
        found = self._plans.get(renamed) or self._read(renamed)
        if found is None:
            found = plan(renamed, self._effort)
            self._write(found)
        self._plans[renamed] = found
        return rename(found, _inverse(renaming))

    def has(self, problem: Problem) -> bool:
        renamed, _ = canonical(problem)
        return renamed in self._plans or self._read(renamed) is not None

    def path(self, problem: Problem) -> Path | None:
        """Where the plan of a canonical problem is kept."""
        if self._directory is None:
            return None
        lost = "-".join(f"{worker.replica}.{worker.stage}" for worker in sorted(problem.lost))
        return self._directory / f"{lost or 'none'}-{_digest(problem)}.json"

    def _read(self, problem: Problem) -> Plan | None:
        path = self.path(problem)
        if path is None or not path.exists():
            return None
        try:
            found = plan_from_json(msgspec.json.decode(path.read_bytes()))
        except (msgspec.DecodeError, EverstepError, KeyError, TypeError, ValueError):
            return None
        return found if found.problem == problem else None

    def _write(self, made: Plan) -> None:
        path = self.path(made.problem)
        if path is None:
            return
        # Renamed into place, so that a reader or a crash never sees half a plan.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(msgspec.json.encode(plan_to_json(made)))
        os.replace(file.name, path)


def _digest(problem: Problem) -> str:
    document = msgspec.json.encode(problem_to_json(problem), order="sorted")
    return hashlib.sha256(document).hexdigest()[:16]


def losses_to_prepare(problem: Problem, *, at_most: int) -> Iterator[Problem]:
    """One problem for each set of up to `at_most` losses, up to the names of replicas, that leaves
    every stage a live worker. Fewest losses first."""
    for num_lost in range(at_most + 1):
        for rows in _loss_patterns(num_lost, problem.stages):
            if len(rows) <= problem.replicas and _leaves_every_stage_alive(problem, rows):
                yield replace(
                    problem,
                    lost=frozenset(
                        WorkerId(replica, stage)
                        for replica, row in enumerate(rows)
                        for stage in row
                    ),
                )


_Rank = tuple[int, tuple[int, ...]]


def _rank(row: tuple[int, ...]) -> _Rank:
    """The order of replicas in a canonical problem, by the stages they lost: most losses first."""
    return -len(row), row


def _loss_patterns(
    num_lost: int, num_stages: int, *, after: _Rank | None = None
) -> Iterator[list[tuple[int, ...]]]:
    """All ways to lose `num_lost` workers: the lost stages of each hit replica, in rank order."""
    if num_lost == 0:
        yield []
    for size in range(min(num_lost, num_stages), 0, -1):
        for row in combinations(range(num_stages), size):
            if after is None or _rank(row) >= after:
                for rest in _loss_patterns(num_lost - size, num_stages, after=_rank(row)):
                    yield [row, *rest]


def _leaves_every_stage_alive(problem: Problem, rows: list[tuple[int, ...]]) -> bool:
    losses = Counter(stage for row in rows for stage in row)
    return all(num_lost < problem.replicas for num_lost in losses.values())


def canonical(problem: Problem) -> tuple[Problem, Renaming]:
    """The same losses with replicas renamed, so that equal patterns become equal problems."""
    rows = [
        tuple(sorted(w.stage for w in problem.lost if w.replica == replica))
        for replica in range(problem.replicas)
    ]
    order = sorted(range(problem.replicas), key=lambda r: (*_rank(rows[r]), r))
    renaming = _inverse(tuple(order))
    lost = frozenset(WorkerId(renaming[w.replica], w.stage) for w in problem.lost)
    return replace(problem, lost=lost), renaming


def _inverse(renaming: Renaming) -> Renaming:
    return tuple(sorted(range(len(renaming)), key=lambda replica: renaming[replica]))


def rename(made: Plan, renaming: Renaming) -> Plan:
    """The same plan with replicas called by other names."""
    if renaming == tuple(range(len(renaming))):
        return made

    def place(worker: WorkerId) -> WorkerId:
        return WorkerId(renaming[worker.replica], worker.stage)

    return replace(
        made,
        problem=replace(made.problem, lost=frozenset(map(place, made.problem.lost))),
        actions={
            place(worker): tuple(
                action._replace(
                    replica=renaming[action.replica],
                    worker=place(action.worker),
                    receives_from=action.receives_from and place(action.receives_from),
                    sends_to=action.sends_to and place(action.sends_to),
                )
                for action in row
            )
            for worker, row in made.actions.items()
        },
        channels={
            Channel(place(channel.sender), place(channel.receiver), channel.kind): tuple(
                (renaming[replica], microbatch) for replica, microbatch in order
            )
            for channel, order in made.channels.items()
        },
    )
