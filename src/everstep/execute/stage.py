"""Runs F, B and W of one stage on one device.

    forward  -->  backward_input  -->  backward_weight        B and W apart, for decoupled plans
    forward  -->  backward_fused                              or together, for glued ones

Both ways give bitwise the same gradients. Does not know peers, plans or optimizers. Invariant: what
a micro-batch holds (activations, then what W needs) is let go by its last call.

The first stage has no input gradient: its B only keeps the output gradients, its W does everything.
Running statistics (BatchNorm and the like) are buffers of each worker, moved by the micro-batches
it runs: workers of one stage may differ in them, the whole model's come from one worker of each
stage, and a micro-batch that is run again counts twice in them. Parameters never differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

from everstep.core.errors import ConfigError
from everstep.execute.backward import DeferredWeights, input_gradients, nodes_of
from everstep.execute.boundary import flatten, gradients_flow, unflatten
from everstep.execute.buckets import GradientBuckets
from everstep.execute.data import PARTS, Microbatch, Part
from everstep.execute.randomness import keyed_randomness, seed_for
from everstep.execute.split import StageModule

Scorer = Callable[[Any, Any], Any]
"""A loss or metric: (output, target) -> one number, a mean over the samples."""

OnReady = Callable[[Parameter], None]

BUCKET_BYTES = {"cpu": 4 << 20}
"""By device. On a processor the sums are slow, and the last bucket's begins when W ends: nothing
hides it, so it should be small."""


class Result(NamedTuple):
    """What the last stage found for one micro-batch."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One forward without training: values for the next stage, or the last stage's result."""

    tensors: list[Tensor]
    structure: str
    result: Result | None


@dataclass(slots=True, kw_only=True)
class _Held:
    """What a micro-batch keeps between F and W. Edges hold the graph, but not the outputs."""

    inputs: list[Tensor]
    outputs: list[GradientEdge | None]
    gradients: Sequence[Tensor | None] = ()
    deferred: DeferredWeights | None = None

    def has_input_gradient(self) -> bool:
        return any(tensor.requires_grad for tensor in self.inputs)

    def roots(self) -> list[tuple[GradientEdge, Tensor]]:
        pairs = zip(self.outputs, self.gradients, strict=True)
        return [(edge, gradient) for edge, gradient in pairs if edge and gradient is not None]


class Stage:
    """One stage of the model with its gradients (`buckets`)."""

    def __init__(
        self,
        module: StageModule,
        *,
        index: int,
        num_stages: int,
        loss: Scorer,
        metrics: Mapping[str, Scorer] | None = None,
        loss_scale: float = 1.0,
        precision: Literal["bf16"] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        bucket_bytes: int | None = None,
    ) -> None:
        self.index = index
        self.num_stages = num_stages
        self.device = torch.device(device)
        self.module = module
        self.module.module.to(self.device)
        self.buckets = GradientBuckets(
            module.module.parameters(),
            bucket_bytes=bucket_bytes or BUCKET_BYTES.get(self.device.type, 25 << 20),
        )
        self._weights = nodes_of(self.buckets.params)
        self._loss = loss
        self._metrics = dict(metrics or {})
        self._loss_scale = loss_scale
        self._precision = precision
        self._seed = seed
        self._held: dict[Microbatch, _Held] = {}
        self._results: dict[Microbatch, tuple[Tensor, dict[str, Any]]] = {}
        self._boundary: list[tuple[torch.Size, torch.dtype]] | None = None
        self._on_accumulated: OnReady = self.buckets.accumulated
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for param in self.buckets.params
        ]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def in_flight(self) -> tuple[Microbatch, ...]:
        """Micro-batches whose F is done and W is not."""
        return tuple(self._held)

    def forward(
        self, mb: Microbatch, inputs: Sequence[Tensor], structure: str, target: Any = None
    ) -> tuple[list[Tensor], str]:
        """F. Returns what the next stage gets; the last stage takes the loss instead: ([], "")."""
        leaves = self._leaves(inputs, structure)
        seed = seed_for(self._seed, mb.step, mb.replica, mb.number, self.index)
        with keyed_randomness(seed, device=self.device), self._autocast():
            value = self.module.call(unflatten(_entered(leaves), structure))
            if self.is_last:
                loss, metrics = self._score(value, target)
                self._results[mb] = (loss.detach(), metrics)
                value = loss
        outputs, shape = flatten(value)
        self._held[mb] = _Held(
            inputs=leaves,
            outputs=[get_gradient_edge(out) if out.requires_grad else None for out in outputs],
        )
        if self.is_last:
            self._held[mb].gradients = [torch.full_like(outputs[0], self._loss_scale)]
            return [], ""
        self._check_boundary(mb, outputs)
        return [output.detach() for output in outputs], shape

    def backward_input(
        self, mb: Microbatch, output_gradients: Sequence[Tensor | None] = ()
    ) -> list[Tensor | None]:
        """B. Takes one gradient per output (none on the last stage), gives one per input."""
        held = self._held[mb]
        self._receive(held, output_gradients)
        if not held.has_input_gradient():
            return [None] * len(held.inputs)
        wanted = [tensor for tensor in held.inputs if tensor.requires_grad]
        gradients, deferred = input_gradients(held.roots(), wanted, self._weights)
        in_order = iter(gradients)
        aligned = [next(in_order) if tensor.requires_grad else None for tensor in held.inputs]
        self._held[mb] = _Held(inputs=[], outputs=[], deferred=deferred)
        return aligned

    def backward_weight(self, mb: Microbatch, *, on_ready: OnReady | None = None) -> None:
        """W. Adds to the gradients; `on_ready` hears of each parameter once, when it is final.

        Parameters that the micro-batch did not use are reported too, at the end. On a GPU the
        first stage reports from autograd's thread.
        """
        held = self._held.pop(mb)
        with self._reporting(on_ready):
            if held.deferred is None:
                self._run_all(held)
                return
            for param, gradient in held.deferred.run():
                self.buckets.add(param, gradient)
                self._accumulated(param)

    def backward_fused(
        self,
        mb: Microbatch,
        output_gradients: Sequence[Tensor | None] = (),
        *,
        on_ready: OnReady | None = None,
    ) -> list[Tensor | None]:
        """B and W together, in one plain backward pass."""
        held = self._held.pop(mb)
        self._receive(held, output_gradients)
        with self._reporting(on_ready):
            self._run_all(held)
        return [tensor.grad for tensor in held.inputs]

    def evaluate(self, inputs: Sequence[Tensor], structure: str, target: Any = None) -> Evaluated:
        """Forward only, in evaluation mode. Keeps nothing; shapes may differ from training's."""
        tensors = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
        with torch.no_grad(), self._evaluation_mode(), self._autocast():
            value = self.module.call(unflatten(tensors, structure))
            if not self.is_last:
                outputs, shape = flatten(value)
                return Evaluated(tensors=outputs, structure=shape, result=None)
            loss, metrics = self._score(value, target)
        return Evaluated(tensors=[], structure="", result=_as_result(loss, metrics))

    def take_results(self, step: int) -> dict[Microbatch, Result]:
        """Losses and metrics of the step's micro-batches that ran here, and forgets them."""
        of_step = [mb for mb in self._results if mb.step == step]
        return {mb: _as_result(*self._results.pop(mb)) for mb in of_step}

    def settle(self) -> None:
        """Returns when the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def abandon(self) -> None:
        """Lets go of all micro-batches in flight and their results: they will be run again."""
        self._held.clear()
        self._results.clear()

    def let_go(self) -> None:
        """It is not needed any more: no hook keeps its memory."""
        self.abandon()
        for hook in self._hooks:
            hook.remove()
        for param in self.buckets.params:
            param.grad = None

    def _leaves(self, inputs: Sequence[Tensor], structure: str) -> list[Tensor]:
        """The inputs, cut off from where they came from. What the sender's gradient flows
        through gets one; a mask does not, since attention is slower, and other, with one that does.
        """
        leaves = [tensor.detach().to(self.device, non_blocking=True) for tensor in inputs]
        if not self.is_first:
            for leaf, flows in zip(leaves, gradients_flow(structure), strict=True):
                leaf.requires_grad_(flows)
        return leaves

    def _score(self, output: Any, target: Any) -> tuple[Tensor, dict[str, Any]]:
        target = _moved(target, self.device)
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigError("loss", found, "must be a tensor with one number, the mean")
        with torch.no_grad():
            metrics = {name: score(output, target) for name, score in self._metrics.items()}
        return loss, metrics

    def _check_boundary(self, mb: Microbatch, outputs: Sequence[Tensor]) -> None:
        found = [(output.shape, output.dtype) for output in outputs]
        if self._boundary is None:
            self._boundary = found
        if found != self._boundary:
            del self._held[mb]
            raise ConfigError(
                f"the output of stage {self.index} for {mb}",
                _describe(found),
                f"must be {_describe(self._boundary)} as for the micro-batches before: shapes and"
                " types between stages may not change (pad or cut the samples to one size)",
            )

    def _receive(self, held: _Held, gradients: Sequence[Tensor | None]) -> None:
        if not self.is_last:
            held.gradients = [
                None if grad is None else grad.to(self.device, non_blocking=True)
                for grad in gradients
            ]

    def _run_all(self, held: _Held) -> None:
        roots = held.roots()
        if roots:
            edges, gradients = zip(*roots, strict=True)
            torch.autograd.backward(edges, gradients)

    def _accumulated(self, param: Tensor) -> None:
        assert isinstance(param, Parameter)
        self._on_accumulated(param)

    @contextmanager
    def _reporting(self, on_ready: OnReady | None) -> Iterator[None]:
        """While W runs: parameters are reported as they get their gradients, unused ones last."""
        if on_ready is None:
            yield
            return
        reported: set[Parameter] = set()

        def report(param: Parameter) -> None:
            self.buckets.accumulated(param)
            reported.add(param)
            on_ready(param)

        self._on_accumulated = report
        try:
            yield
        finally:
            self._on_accumulated = self.buckets.accumulated
        for param in self.buckets.params:
            if param not in reported:
                on_ready(param)

    def _autocast(self) -> torch.autocast:
        is_on = self._precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_on)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        # Module by module, because a user may hold some of them (a frozen BatchNorm) in eval mode.
        modes = {module: module.training for module in self.module.module.modules()}
        self.module.module.eval()
        try:
            yield
        finally:
            for module, is_training in modes.items():
                module.training = is_training


def data_parts(stage: Stage) -> list[Part]:
    """What a worker of the stage needs from the dataset: inputs first, targets last."""
    needed = {"input": stage.is_first, "target": stage.is_last}
    return [part for part in PARTS if needed[part]]


class _Enter(torch.autograd.Function):
    """Makes a leaf look computed, so that a layer such as `nn.ReLU(inplace=True)` may change it."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0]


def _entered(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [_Enter.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]  # type: ignore[no-untyped-call]


def _as_result(loss: Tensor, metrics: Mapping[str, Any]) -> Result:
    return Result(float(loss), {name: float(value) for name, value in metrics.items()})


def _moved(value: Any, device: torch.device) -> Any:
    tensors, structure = flatten(value)
    return unflatten([tensor.to(device, non_blocking=True) for tensor in tensors], structure)


def _describe(boundary: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    parts = (f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in boundary)
    return ", ".join(parts)
