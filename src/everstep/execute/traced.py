"""Cuts any module at named submodules, through torch's tracer (`torch.distributed.pipelining`).

    x --> [piece 0] --a--> [piece 1] --b--> [piece 2] --> output
              |                                 ^
              +-----------------c---------------+

The tracer lets piece 2 read `c` from piece 0; a pipeline has only neighbours. So each piece passes
on what later pieces read: here piece 1 receives (a, c) and returns (b, c).

A trace fixes dropout and batch norm to the mode it was made in, so the module is traced twice, for
training and for evaluation, over the same parameters and buffers. It fixes shapes too: every
micro-batch, of an evaluation too, must have the shape of the example, on the example's device.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from everstep.core.errors import ConfigError
from everstep.execute.boundary import flatten, unflatten
from everstep.execute.split import StageModule, leaving_no_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The traced graph: calls of pieces, in order, and which values each boundary carries."""

    modules: list[nn.Module]
    nodes: list[list[fx.Node]]
    """Per piece: its call, and the picking of single values from the tuple that it returned."""

    live: list[list[str]]
    """Before each piece, and after the last: the names of the values that are still read."""

    output: str
    """Puts the last values together as the model would (see boundary.py)."""

    def run(self, piece: int, values: Sequence[Any]) -> list[Any]:
        known = dict(zip(self.live[piece], values, strict=True))
        for node in self.nodes[piece]:
            run = self.modules[piece] if node.op == "call_module" else node.target
            assert callable(run)
            known[node.name] = run(*fx.map_arg(node.args, lambda read: known[read.name]))
        return [known[name] for name in self.live[piece + 1]]


class TracedSlice(nn.Module):
    """Consecutive pieces of a traced module. The first takes what the module takes."""

    def __init__(
        self, pieces: range, *, training: _Program, evaluation: _Program, signature: Any
    ) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(training.modules[index] for index in pieces)
        self.unread = nn.Module()
        self._range = pieces
        self._programs = {True: training, False: evaluation}
        self._signature: inspect.Signature = signature

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        program = self._programs[self.training]
        values: Sequence[Any] = args
        if self._range.start == 0:
            values = flatten(positional(self._signature, args, kwargs))[0]
        for piece in self._range:
            values = program.run(piece, values)
        if self._range.stop < len(program.nodes):
            return tuple(values)
        return unflatten(list(values), program.output)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TracedSlice:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Moving a module replaces its buffers: the evaluation's pieces must follow.
        for piece in self._range:
            evaluated = self._programs[False].modules[piece]
            evaluated._apply(fn)  # type: ignore[no-untyped-call]
            _bind(evaluated, self._programs[True].modules[piece])
        return self


class TracedPieces:
    """A module in pieces, ready to be joined to stages."""

    def __init__(self, model: nn.Module, *, training: _Program, evaluation: _Program) -> None:
        self._model = model
        self._training = training
        self._evaluation = evaluation

    def __len__(self) -> int:
        return len(self._training.nodes)

    def join(self, pieces: range) -> StageModule:
        """One stage from consecutive pieces."""
        module = TracedSlice(
            pieces,
            training=self._training,
            evaluation=self._evaluation,
            signature=inspect.signature(self._model.forward),
        )
        names = {key: key.split(".", 2)[2] for key in module.state_dict()}
        names |= _adopt_unread(module, pieces, model=self._model, program=self._training)
        return StageModule(module=module, names=names, takes_arguments=True)


def trace_pieces(model: nn.Module, *, example: Any, split: Sequence[str]) -> TracedPieces:
    signature = inspect.signature(model.forward)
    match example:
        case tuple() | list():
            arguments = positional(signature, example, {})
        case dict():
            arguments = positional(signature, (), example)
        case _:
            arguments = (example,)
    with leaving_no_trace([model]):
        training = _trace(model, arguments, split)
        with _in_evaluation(model):
            evaluation = _trace(model, arguments, split)
    return TracedPieces(model, training=training, evaluation=evaluation)


def positional(
    signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments in the order of the signature: traced graphs know no names."""
    bound = signature.bind(*args, **kwargs)
    if bound.kwargs:
        raise ConfigError(
            "the model's input",
            f"a dict with {', '.join(bound.kwargs)}",
            "a model with split= takes only arguments that can be given by position, without gaps",
        )
    return bound.args


def _trace(model: nn.Module, arguments: tuple[Any, ...], split: Sequence[str]) -> _Program:
    with torch.no_grad():
        output = flatten(model(*arguments))[1]
    try:
        with warnings.catch_warnings(), _restoring_attributes(model):
            # Deprecations inside the tracer, which its callers can do nothing about.
            warnings.simplefilter("ignore")
            pipe = pipeline(model, arguments, split_spec=dict.fromkeys(split, SplitPoint.BEGINNING))
    except RuntimeError as error:
        raise ConfigError(
            "split",
            list(split),
            "the model cannot be traced as one graph (a branch or shape that depends on data?):"
            " build it as an nn.Sequential instead",
        ) from error
    for piece in pipe.split_gm.children():
        _bind(piece, model)
    return _read(pipe.split_gm, output=output, num_inputs=len(flatten(arguments)[0]))


@contextmanager
def _restoring_attributes(model: nn.Module) -> Iterator[None]:
    """The tracer marks split points by replacing `forward` of instances, and leaves it so."""
    before = {module: dict(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)


def _read(graph_module: fx.GraphModule, *, output: str, num_inputs: int) -> _Program:
    modules: list[nn.Module] = []
    nodes: list[list[fx.Node]] = []
    inputs: list[str] = []
    results: list[str] = []
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "call_module":
            modules.append(graph_module.get_submodule(str(node.target)))
            nodes.append([node])
        elif node.op == "output":
            results = [read.name for read in node.args[0] if isinstance(read, fx.Node)]
        else:
            nodes[-1].append(node)
    if len(inputs) != num_inputs:
        raise ConfigError(
            "the model's input", f"{num_inputs} tensors", f"the traced model reads {len(inputs)}"
        )
    live = [results]
    for piece in reversed(nodes):
        made = {node.name for node in piece}
        reads = [read.name for node in piece for read in node.all_input_nodes]
        # A dict keeps the first of several readers, in an order every worker agrees on.
        live.insert(0, [name for name in dict.fromkeys([*reads, *live[0]]) if name not in made])
    # The first boundary is the model's input: all of it, in its order, read or not.
    live[0] = inputs
    return _Program(modules=modules, nodes=nodes, live=live, output=output)


def _adopt_unread(
    module: TracedSlice, pieces: range, *, model: nn.Module, program: _Program
) -> dict[str, str]:
    """Gives `module` what no piece reads, yet belongs to the state of the model.

    A second name of a tied parameter goes where the parameter is, all else to the first piece.
    """
    piece_of = {
        tensor: index
        for index, piece in reversed(list(enumerate(program.modules)))
        for tensor in (*piece.parameters(), *piece.buffers())
    }
    read = {key for piece in program.modules for key in piece.state_dict()}
    tensors = _tensors_of(model)
    names = {}
    for number, key in enumerate(model.state_dict()):
        if key not in read and piece_of.get(tensors[key], 0) in pieces:
            _register(module.unread, str(number), tensors[key])
            names[f"unread.{number}"] = key
    return names


def _bind(piece: nn.Module, model: nn.Module) -> None:
    """Makes the state of `piece` that of `model`, by name. The tracer copies tied parameters."""
    tensors = _tensors_of(model)
    for name in _tensors_of(piece):
        if name in tensors:
            path, _, attribute = name.rpartition(".")
            _register(piece.get_submodule(path), attribute, tensors[name])


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        is_saved = name not in module._non_persistent_buffers_set
        module.register_buffer(name, tensor, persistent=is_saved)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training
