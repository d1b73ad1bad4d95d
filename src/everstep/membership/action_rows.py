"""A worker's actions as they travel: short rows, without what the receiver knows anyway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind

ActionRow: TypeAlias = tuple[Kind, int, int, int | None, int | None]
"""Kind, replica and micro-batch, then the replicas of the peers to receive from and to send to.
The peers' stages follow from the kind: F goes down the pipeline, B up."""


def pack_actions(actions: Iterable[Action]) -> tuple[ActionRow, ...]:
    """A worker's actions as rows. Planned times stay behind: the order is what counts."""
    return tuple(
        (
            action.kind,
            action.replica,
            action.microbatch,
            None if action.receives_from is None else action.receives_from.replica,
            None if action.sends_to is None else action.sends_to.replica,
        )
        for action in actions
    )


def unpack_actions(rows: Iterable[ActionRow], *, worker: WorkerId) -> tuple[Action, ...]:
    return tuple(_unpack(row, worker) for row in rows)


def _unpack(row: ActionRow, worker: WorkerId) -> Action:
    kind, replica, microbatch, receives_from, sends_to = row
    # W has no peers, so its direction is of no matter.
    downstream = 1 if kind is Kind.FORWARD else -1
    return Action(
        kind=kind,
        stage=worker.stage,
        replica=replica,
        microbatch=microbatch,
        worker=worker,
        receives_from=_peer(receives_from, worker.stage - downstream),
        sends_to=_peer(sends_to, worker.stage + downstream),
        start=0.0,
        end=0.0,
    )


def _peer(replica: int | None, stage: int) -> WorkerId | None:
    return None if replica is None else WorkerId(replica, stage)
