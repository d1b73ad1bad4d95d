"""Decides from which step survivors go on, and how each stage gets there. Pure.

By the watermark rule every live worker has finished the open step, t, or the one before, and the
gradients of t are still there on whoever finished it. So there are two ways out:

    roll forward   some live worker of every stage finished t: the others copy its state, and t
                   stands. Exact, and nothing is computed again.
    undo           some stage has nobody who finished t: whoever did takes it back (SWIFT's
                   update-undo), and t is run again.

A worker without state, new or interrupted while it copied, gets a copy either way.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.ids import WorkerId
from everstep.membership.recovering import Hopeless, Recovery, Rung, StateCopy, Survivor
from everstep.membership.roster import Shape


def decide_recovery(
    survivors: Sequence[Survivor], *, shape: Shape, open_step: int
) -> Recovery | Hopeless:
    """`open_step` is the one that not everybody was known to have finished."""
    by_stage = [
        [survivor for survivor in survivors if survivor.place.stage == stage]
        for stage in range(shape.stages)
    ]
    for stage, members in enumerate(by_stage):
        if not any(survivor.finished_step is not None for survivor in members):
            return _hopeless(stage, members)
    is_stage_done = [any(s.finished_step == open_step for s in members) for members in by_stage]
    target = open_step if all(is_stage_done) else open_step - 1
    undo = frozenset(s.place for s in survivors if _is_ahead(s, target))
    copies = tuple(copy for members in by_stage for copy in _copies(members, target))
    rungs = tuple(_rung(members, target, undo) for members in by_stage)
    return Recovery(
        finished_step=target,
        rungs=rungs,
        undo=undo,
        copies=copies,
        operations=min(s.operations for s in survivors if s.finished_step is not None),
        reason=_reason(open_step, is_stage_done, undo, copies),
    )


def _is_ahead(survivor: Survivor, target: int) -> bool:
    return survivor.finished_step is not None and survivor.finished_step > target


def _copies(members: Sequence[Survivor], target: int) -> list[StateCopy]:
    """Who lacks the target state gets it from those who have it, taken in turn.

    A step taken back is right to a rounding error only; so whoever does that, and has a peer that
    never took it, copies the peer's bits. Where all take it back, all get the same bits.
    """
    there = [s for s in members if s.finished_step == target]
    sources = there or [s for s in members if _is_ahead(s, target)]
    needy = [s for s in members if s not in sources]
    return [
        StateCopy(sources[number % len(sources)].place, survivor.place)
        for number, survivor in enumerate(needy)
    ]


def _rung(members: Sequence[Survivor], target: int, undo: frozenset[WorkerId]) -> Rung:
    if any(survivor.finished_step is None for survivor in members):
        return Rung.REPLICA
    if any(survivor.place in undo for survivor in members):
        return Rung.UNDO
    if any(survivor.finished_step != target for survivor in members):
        return Rung.ROLL_FORWARD
    return Rung.CONTINUE


def _reason(
    open_step: int,
    is_stage_done: Sequence[bool],
    undo: frozenset[WorkerId],
    copies: Sequence[StateCopy],
) -> str:
    if all(is_stage_done):
        how = f"{len(copies)} copy it" if copies else "so has everybody"
        return f"a live worker of every stage finished step {open_step}; {how}"
    missing = is_stage_done.index(False)
    if undo:
        return (
            f"nobody alive finished step {open_step} of stage {missing};"
            f" {len(undo)} workers take it back"
        )
    return f"nobody finished step {open_step}; it is run again"


def _hopeless(stage: int, members: Sequence[Survivor]) -> Hopeless:
    if not members:
        reason = f"stage {stage} has no live worker left"
    else:
        names = ", ".join(str(survivor.place) for survivor in members)
        reason = f"stage {stage} has live workers ({names}), but none that holds its state"
    return Hopeless(stage=stage, reason=reason)
