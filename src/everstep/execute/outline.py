"""Stages without their parameters: what a worker keeps of those it does not run.

Names, shapes and buffers stay, for whoever asks what another stage holds, and so does all else that
building the model has made; the memory of the parameters is given back. Knows no workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn import Parameter

from everstep.execute.split import StageModule


def outline(stages: Iterable[StageModule], *, keep: StageModule) -> None:
    """Leaves only `keep` with its parameters."""
    for stage in stages:
        if stage is not keep:  # No two stages have a parameter in common: `split_model` sees to it.
            _exchange(stage.module, lambda param: _parameter_like(param, device="meta"))


def filled_in(stage: StageModule, *, device: torch.device) -> StageModule:
    """A copy with memory for its parameters, which are to be loaded. Raises TypeError or
    RuntimeError where something the user's module holds cannot be copied."""
    module = copy.deepcopy(stage.module)
    _exchange(module, lambda param: _parameter_like(param, device=device))
    return replace(stage, module=module)


def _exchange(module: nn.Module, make: Callable[[Parameter], Parameter]) -> None:
    made: dict[Parameter, Parameter] = {}  # One that is used twice stays one.
    for owner, name, param in list(_owned(module)):
        if param not in made:
            made[param] = make(param)
        # Not by `_parameters`: some modules (recurrent ones) keep a list of theirs beside it.
        setattr(owner, name, made[param])


def _owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, Parameter]]:
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                yield owner, name, param


def _parameter_like(param: Parameter, *, device: torch.device | str) -> Parameter:
    values = torch.empty_like(param, device=device)
    return Parameter(values, requires_grad=param.requires_grad)
