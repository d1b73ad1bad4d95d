"""Decides from which step survivors go on, and how each stage gets there. Pure.

By the watermark rule every live worker has finished the open step, t, or the one before, and the
gradients of t are still there on whoever finished it. So there are two ways out:

    roll forward   some live worker of every stage finished t: the others copy its state, and t
                   stands. Exact, and nothing is computed again.
    undo           some stage has nobody who finished t: whoever did takes it back (SWIFT's
                   update-undo), and t is run again.

Taking a step back leaves rounding errors, and the workers of a stage must stay equal bit for bit.
So in a stage where some finished t and some did not, those ahead copy the state of one that did
not; only a stage whose workers are all ahead undoes. A worker without state gets a copy either way.
Invariant: nobody is told both to undo and to copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.core.ids import WorkerId
from everstep.membership.recovering import Hopeless, Recovery, Rung, StateCopy, Survivor
from everstep.membership.roster import Shape


def decide_recovery(
    survivors: Sequence[Survivor],
    *,
    shape: Shape,
    open_step: int,
    rebuilt: frozenset[int] = frozenset(),
) -> Recovery | Hopeless:
    """`open_step` is the one that not everybody was known to have finished. Stages that are
    `rebuilt` go where the others are."""
    by_stage = {
        stage: [survivor for survivor in survivors if survivor.place.stage == stage]
        for stage in range(shape.stages)
        if stage not in rebuilt
    }
    for stage, members in by_stage.items():
        if not any(survivor.finished_step is not None for survivor in members):
            return _hopeless(stage, members)
    is_stage_done = {
        stage: any(s.finished_step == open_step for s in members)
        for stage, members in by_stage.items()
    }
    target = open_step if all(is_stage_done.values()) else open_step - 1
    undo = frozenset(place for members in by_stage.values() for place in _undo(members, target))
    copies = tuple(copy for members in by_stage.values() for copy in _copies(members, target, undo))
    rungs = tuple(
        Rung.REPLAY if stage in rebuilt else _rung(by_stage[stage], target, undo)
        for stage in range(shape.stages)
    )
    return Recovery(
        finished_step=target,
        rungs=rungs,
        undo=undo,
        copies=copies,
        operations=min(s.operations for s in survivors if s.finished_step is not None),
        reason=_reason(open_step, is_stage_done, undo, copies),
    )


def _undo(members: Sequence[Survivor], target: int) -> list[WorkerId]:
    """Who takes a step back: all that hold a state, when none of them is there already."""
    holders = [survivor for survivor in members if survivor.finished_step is not None]
    if any(survivor.finished_step == target for survivor in holders):
        return []
    return [survivor.place for survivor in holders]


def _copies(members: Sequence[Survivor], target: int, undo: frozenset[WorkerId]) -> list[StateCopy]:
    """Who lacks the target state gets it from those who will have it, taken in turn."""
    sources = [s for s in members if s.finished_step == target or s.place in undo]
    needy = [s for s in members if s not in sources]
    return [
        StateCopy(sources[number % len(sources)].place, survivor.place)
        for number, survivor in enumerate(needy)
    ]


def _rung(members: Sequence[Survivor], target: int, undo: frozenset[WorkerId]) -> Rung:
    steps = {survivor.finished_step for survivor in members}
    if None in steps:
        return Rung.REPLICA
    if any(survivor.place in undo for survivor in members):
        return Rung.UNDO
    if target - 1 in steps:
        return Rung.ROLL_FORWARD
    if target + 1 in steps:
        return Rung.STEP_BACK
    return Rung.CONTINUE


def _reason(
    open_step: int,
    is_stage_done: Mapping[int, bool],
    undo: frozenset[WorkerId],
    copies: Sequence[StateCopy],
) -> str:
    if all(is_stage_done.values()):
        how = f"{len(copies)} copy it" if copies else "so has everybody"
        return f"a live worker of every stage finished step {open_step}; {how}"
    if not any(is_stage_done.values()):
        return f"nobody finished step {open_step}; it is run next"
    missing = next(stage for stage, is_done in is_stage_done.items() if not is_done)
    return (
        f"nobody alive finished step {open_step} of stage {missing}; {len(undo)} workers take it"
        f" back, {len(copies)} copy the state before it"
    )


def _hopeless(stage: int, members: Sequence[Survivor]) -> Hopeless:
    if not members:
        reason = f"stage {stage} has no live worker left"
    else:
        names = ", ".join(str(survivor.place) for survivor in members)
        reason = f"stage {stage} has live workers ({names}), but none that holds its state"
    return Hopeless(stage=stage, reason=reason)
