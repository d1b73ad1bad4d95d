"""Takes back the last step of an optimizer from the gradients that are still there.

Knows nothing of workers, generations or why a step must go. Everything that can be refused is
refused before the first number changes, so an optimizer is never left half-way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everstep.core.errors import CannotUndo
from everstep.recovery.undo_batches import numbers
from everstep.recovery.undo_record import Keep, Scheduler, StepRecord, take_record
from everstep.recovery.undo_rule import Rule
from everstep.recovery.undo_rules import RULES
from everstep.recovery.undo_run import KEEP_ALL, KEEP_SOME, Undoing, UndoReport

__all__ = [
    "Keep",
    "NotUndoable",
    "StepRecord",
    "UndoReport",
    "Undoable",
    "check_undoable",
    "remember",
    "undo",
]

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoable:
    """A step of this optimizer can be taken back without keeping any copy."""

    cautions: tuple[str, ...] = ()
    """What may still spoil it, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotUndoable:
    """A step of this optimizer has no inverse; `what_to_do` says what helps."""

    optimizer: str
    reason: str
    what_to_do: str


def check_undoable(
    optimizer: torch.optim.Optimizer, *, rule: Rule | None = None
) -> Undoable | NotUndoable:
    """Says before training whether steps can be taken back, looking at settings only."""
    name, rule = type(optimizer).__name__, rule or RULES.get(type(optimizer))
    if rule is None:
        reason = f"everstep knows no inverse of the step of class {name}"
        return NotUndoable(optimizer=name, reason=reason, what_to_do=KEEP_ALL)
    hypers = [numbers(group) for group in optimizer.param_groups]
    obstacles = [obstacle for hyper in hypers for obstacle in rule.obstacles(hyper)]
    for obstacle in obstacles:
        if obstacle.is_certain:
            reason = obstacle.sentence
            return NotUndoable(optimizer=name, reason=reason, what_to_do=KEEP_SOME)
    cautions = [f"{name}: {obstacle.sentence}" for obstacle in obstacles]
    dtypes = {param.dtype for param in _params(optimizer)}
    cautions += [
        f"{name}: parameters in {dtype} come back only to the precision of that type"
        for dtype in _LOW_PRECISION
        if dtype in dtypes
    ]
    return Undoable(cautions=tuple(dict.fromkeys(cautions)))


def remember(
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Scheduler | None = None,
    keep: Keep = Keep.NOTHING,
    rule: Rule | None = None,
) -> StepRecord:
    """Takes a record just before `optimizer.step()`: what `undo` needs to be sure of that step.

    Holds hyper-parameters and the scheduler's state, and no tensor unless `keep` asks for copies.
    """
    rule = rule or RULES.get(type(optimizer))
    if keep is Keep.NOTHING:
        match check_undoable(optimizer, rule=rule):
            case NotUndoable(optimizer=name, reason=reason, what_to_do=what_to_do):
                raise CannotUndo(name, reason=reason, what_to_do=what_to_do)
            case Undoable():
                pass
    names = tuple(_names_to_keep(group, keep, rule) for group in optimizer.param_groups)
    return take_record(optimizer, scheduler=scheduler, names=names)


@torch.no_grad()
def undo(
    optimizer: torch.optim.Optimizer,
    *,
    record: StepRecord | None = None,
    lr: float | Sequence[float] | None = None,
    rule: Rule | None = None,
) -> UndoReport:
    """Brings parameters and optimizer state back to before the last step.

    Uses `p.grad` as the step applied it. With a `record`, hyper-parameters and scheduler go back
    too; without one they must be those of the step, or `lr` names the rate (one, or one for each
    group) that was used. The step can then be repeated, with other gradients if so wished. Call it
    once for a step that was taken: the gradients say nothing about any step before that.
    """
    undoing = Undoing(optimizer, record=record, lr=lr, rule=rule or RULES.get(type(optimizer)))
    undoing.check()
    return undoing.run()


def _names_to_keep(
    group: Mapping[str, Any], keep: Keep, rule: Rule | None
) -> frozenset[str] | None:
    match keep:
        case Keep.NOTHING:
            return frozenset()
        case Keep.EVERYTHING:
            return None
        case Keep.MISSING if rule is None:
            return None
        case Keep.MISSING:
            obstacles = rule.obstacles(numbers(group))
            return frozenset(name for obstacle in obstacles for name in obstacle.keep)


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
