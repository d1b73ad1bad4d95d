"""Cuts a model into stages of about equal cost.

Every worker cuts for itself, so the cut follows from the model and the shape of one micro-batch
alone: counted operations, never measured time. Does not know devices or workers.
A stage may be left without parameters (a slice of activations); its optimizer is then skipped.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from everstep.core.errors import ConfigError
from everstep.execute.boundary import flatten

COST_PER_OUTPUT_ELEMENT = 16
"""Memory traffic of cheap layers, in operations: they move bytes where a matmul computes."""

COST_PER_PARAMETER = 1
"""The optimizer's share, spread over the micro-batches of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModule:
    """One slice of a model."""

    module: nn.Module
    names: Mapping[str, str]
    """From the keys of `module.state_dict()` to those of the whole model's."""

    takes_arguments: bool = False
    """A model gets the items of a tuple or dict as arguments; a layer gets the tuple itself."""

    def call(self, inputs: Any) -> Any:
        if self.takes_arguments and isinstance(inputs, tuple | list):
            return self.module(*inputs)
        if self.takes_arguments and isinstance(inputs, dict):
            return self.module(**inputs)
        return self.module(inputs)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers under the whole model's keys."""
        return {self.names[key]: value for key, value in self.module.state_dict().items()}


def split_model(
    model: nn.Module, *, num_stages: int, example: Any, split: Sequence[str] | None = None
) -> list[StageModule]:
    """The stages of `model`, first to last. They share its parameters and buffers.

    Args:
        example: the input of one micro-batch; run once through the layers to count operations.
        split: for a model that is no `nn.Sequential`, the submodules that begin a new piece.
    """
    if num_stages < 1:
        raise ConfigError("num_stages", num_stages, "must be at least 1")
    if num_stages == 1:
        is_layer = is_plain_sequential(model)
        names = {key: key for key in model.state_dict()}
        return [StageModule(module=model, names=names, takes_arguments=not is_layer)]
    if split is not None:
        stages = _split_traced(model, num_stages=num_stages, example=example, split=split)
    elif is_plain_sequential(model):
        stages = _split_sequential(model, num_stages=num_stages, example=example)
    else:
        raise ConfigError(
            "model",
            f"a {type(model).__name__}",
            f"with {num_stages} stages it must be an nn.Sequential, or split= must name the"
            " submodules that begin a new stage, such as split=['layers.4']",
        )
    _check_nothing_is_tied(stages)
    return stages


def balance(costs: Sequence[int], num_stages: int) -> list[range]:
    """Contiguous, non-empty slices whose largest cost is as small as it can be."""
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ConfigError(
            "num_stages",
            num_stages,
            f"must be between 1 and {count}, the number of layers that can be cut apart",
        )
    before = list(accumulate(costs, initial=0))
    # worst[end]: the best possible largest cost of layers [0, end) in the stages so far.
    worst = before[:]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        next_worst, next_cut = [0] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            cut = _best_cut(worst, before, first=stage, end=end)
            next_cut[end] = cut
            next_worst[end] = max(worst[cut], before[end] - before[cut])
        worst = next_worst
        cuts.append(next_cut)
    bounds = [count]
    for of_stage in reversed(cuts):
        bounds.append(of_stage[bounds[-1]])
    bounds.append(0)
    return [range(start, stop) for start, stop in pairwise(reversed(bounds))]


def _best_cut(worst: list[int], before: list[int], *, first: int, end: int) -> int:
    """Where the last stage of [0, end) begins: `worst` rises with the cut, its cost falls."""
    crossing = bisect_left(
        range(end), True, lo=first, key=lambda cut: worst[cut] >= before[end] - before[cut]
    )
    candidates = [cut for cut in (crossing - 1, crossing) if first <= cut < end]
    return min(candidates, key=lambda cut: max(worst[cut], before[end] - before[cut]))


def is_plain_sequential(module: nn.Module) -> bool:
    """Is calling `module` nothing but calling its children one after another?"""
    hooks = (*module._forward_hooks, *module._forward_pre_hooks)
    has_own_forward = type(module).forward is not nn.Sequential.forward
    return isinstance(module, nn.Sequential) and not has_own_forward and not hooks


def flatten_sequential(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials, each with its name in the whole model, such as `1.0`."""
    for name, child in model._modules.items():
        assert child is not None
        if is_plain_sequential(child) and len(child._modules) > 0:
            yield from flatten_sequential(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _split_sequential(model: nn.Module, *, num_stages: int, example: Any) -> list[StageModule]:
    layers = list(flatten_sequential(model))
    if len(layers) < num_stages:
        raise ConfigError(
            "num_stages",
            num_stages,
            f"must be at most {len(layers)}, the number of layers of the model",
        )
    single = [StageModule(module=layer, names={}) for _, layer in layers]
    costs = count_costs(single, example=example)
    return [_slice_of(layers, piece) for piece in balance(costs, num_stages)]


def _slice_of(layers: Sequence[tuple[str, nn.Module]], piece: range) -> StageModule:
    module = nn.Sequential(*(layers[index][1] for index in piece))
    names = {
        f"{position}.{key}": f"{layers[index][0]}.{key}"
        for position, index in enumerate(piece)
        for key in layers[index][1].state_dict()
    }
    return StageModule(module=module, names=names)


def count_costs(pieces: Sequence[StageModule], *, example: Any) -> list[int]:
    """The cost of each piece on `example`, in operations; leaves no trace in the pieces."""
    costs, value = [], example
    with leaving_no_trace([piece.module for piece in pieces]), torch.no_grad():
        for piece in pieces:
            with FlopCounterMode(display=False) as counter:
                value = piece.call(value)
            num_outputs = sum(tensor.numel() for tensor in flatten(value)[0])
            num_parameters = sum(param.numel() for param in piece.module.parameters())
            costs.append(
                int(counter.get_total_flops())
                + COST_PER_OUTPUT_ELEMENT * num_outputs
                + COST_PER_PARAMETER * num_parameters
            )
    return costs


@contextmanager
def leaving_no_trace(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts back buffers (running statistics) and random states. Nobody's mode is touched."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    buffer.copy_(value)


def _split_traced(
    model: nn.Module, *, num_stages: int, example: Any, split: Sequence[str]
) -> list[StageModule]:
    known = [name for name, _ in model.named_modules() if name]
    for name in split:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise ConfigError("split", repr(name), f"must name a submodule of the model{hint}")
    if len(split) + 1 < num_stages:
        raise ConfigError(
            "split",
            list(split),
            f"makes {len(split) + 1} pieces, fewer than the {num_stages} stages:"
            f" name at least {num_stages - 1} split points",
        )
    # The tracer is heavy (seconds) and only needed here.
    from everstep.execute.traced import trace_pieces

    pieces = trace_pieces(model, example=example, split=split)
    costs = [1] * len(pieces)
    if len(pieces) > num_stages:
        single = [pieces.join(range(index, index + 1)) for index in range(len(pieces))]
        costs = count_costs(single, example=example)
    return [pieces.join(piece) for piece in balance(costs, num_stages)]


def _check_nothing_is_tied(stages: Sequence[StageModule]) -> None:
    """Two stages with one parameter would train two copies of it, apart."""
    owner: dict[nn.Parameter, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for key, param in stage.module.named_parameters():
            name = stage.names[key]
            first_stage, first_name = owner.setdefault(param, (index, name))
            if first_stage != index:
                raise ConfigError(
                    "model",
                    f"tied: {first_name} (stage {first_stage}) is {name} (stage {index})",
                    "a parameter must belong to one stage: cut so that both users are in the same"
                    " stage, use fewer stages, or untie the two",
                )
