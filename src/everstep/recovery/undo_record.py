"""Remembers what a step is about to overwrite and its inverse will need.

Knows no formula. A record without copies holds numbers only: no tensor is kept between steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from everstep.recovery.undo_rule import PARAM


class Keep(StrEnum):
    """Which tensors may be copied before each step, so that it can be taken back."""

    NOTHING = "nothing"
    """No copy: an optimizer whose step has no inverse is refused."""
    MISSING = "missing"
    """Copies of just the tensors that the inverse cannot recover."""
    EVERYTHING = "everything"
    """Copies of parameters and state: undo is then exact to the bit, for any optimizer."""


class Scheduler(Protocol):
    """A learning-rate scheduler, as far as undo needs to know it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What was kept of one parameter."""

    param: Tensor | None
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The circumstances of one step, taken just before it."""

    optimizer: torch.optim.Optimizer
    groups: tuple[Mapping[str, Any], ...]
    """The hyper-parameters of each param group: those the step used."""
    had_state: frozenset[int]
    """Ids of the parameters whose optimizer state existed."""
    kept: tuple[frozenset[str] | None, ...]
    """For each group the names of the tensors that were copied; None means everything."""
    copies: Mapping[int, Copies]
    """By the id of the parameter."""
    scheduler: Scheduler | None = None
    scheduler_state: Mapping[str, Any] | None = None

    @property
    def num_bytes_kept(self) -> int:
        """Bytes of tensors that live until the next record: 0 unless copies were asked for."""
        return sum(_num_bytes([c.param, *c.state.values()]) for c in self.copies.values())


def take_record(
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Scheduler | None,
    names: tuple[frozenset[str] | None, ...],
) -> StepRecord:
    """Takes a record. `names` says for each group which tensors to copy; None means all."""
    copies: dict[int, Copies] = {}
    for group, wanted in zip(optimizer.param_groups, names, strict=True):
        if wanted is None or wanted:
            for param in group["params"]:
                copies[id(param)] = _copied(param, optimizer.state.get(param, {}), wanted)
    return StepRecord(
        optimizer=optimizer,
        groups=tuple(_without_params(group) for group in optimizer.param_groups),
        had_state=frozenset(id(param) for param, state in optimizer.state.items() if state),
        kept=names,
        copies=copies,
        scheduler=scheduler,
        scheduler_state=None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
    )


def restore_circumstances(record: StepRecord) -> None:
    """Puts hyper-parameters and scheduler back to where they were before the step."""
    for group, remembered in zip(record.optimizer.param_groups, record.groups, strict=True):
        for name, value in remembered.items():
            group[name] = _put_back(group.get(name), value)
    if record.scheduler is not None and record.scheduler_state is not None:
        record.scheduler.load_state_dict(copy.deepcopy(dict(record.scheduler_state)))


def restore_param(param: Tensor, copies: Copies) -> None:
    if copies.param is not None:
        param.detach().copy_(copies.param)


def restore_state(state: dict[str, Any], copies: Copies, *, is_everything: bool) -> None:
    """Writes kept entries into the live state; the copies stay untouched for another undo."""
    if is_everything:
        for name in state.keys() - copies.state.keys():
            del state[name]
    for name, value in copies.state.items():
        state[name] = _put_back(state.get(name), value)


def _copied(param: Tensor, state: Mapping[str, Any], wanted: frozenset[str] | None) -> Copies:
    wants_param = wanted is None or PARAM in wanted
    entries = {name: v for name, v in state.items() if wanted is None or name in wanted}
    return Copies(
        param=param.detach().clone() if wants_param else None,
        state=copy.deepcopy(entries),
    )


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _put_back(live: Any, value: Any) -> Any:
    """The value to store: the live tensor itself, refilled, so that other references stay good."""
    if isinstance(live, Tensor) and isinstance(value, Tensor) and live.shape == value.shape:
        return live.detach().copy_(value) if live.requires_grad else live.copy_(value)
    return copy.deepcopy(value)


def _num_bytes(values: list[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
