"""everstep trains PyTorch models through failures and never loses a step.

Public names are loaded when they are first used, so that `import everstep` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.checkpoint.autosave import Autosave as Autosave
    from everstep.core.errors import EverstepError as EverstepError
    from everstep.membership.facts import ClipMode as ClipMode
    from everstep.recovery.logging_settings import Logging as Logging
    from everstep.recovery.undo import Keep as Keep
    from everstep.recovery.undo import check_undoable as check_undoable
    from everstep.recovery.undo import remember as remember
    from everstep.recovery.undo import undo as undo
    from everstep.training.job import Job as Job
    from everstep.training.run import Run as Run
    from everstep.training.run import Step as Step
    from everstep.training.saving import Checkpoints as Checkpoints
    from everstep.training.wiring import train as train

_HOMES = {
    "Autosave": "everstep.checkpoint.autosave",
    "ClipMode": "everstep.membership.facts",
    "EverstepError": "everstep.core.errors",
    "Checkpoints": "everstep.training.saving",
    "Job": "everstep.training.job",
    "Keep": "everstep.recovery.undo",
    "Logging": "everstep.recovery.logging_settings",
    "Run": "everstep.training.run",
    "Step": "everstep.training.run",
    "check_undoable": "everstep.recovery.undo",
    "remember": "everstep.recovery.undo",
    "train": "everstep.training.wiring",
    "undo": "everstep.recovery.undo",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}") from None
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
