"""Splits the backward pass of one stage: B, the gradients of its inputs, and W, of its weights.

    outputs --> ... --> n --> ... --> inputs       the trunk: nodes that lead to an input
                        |
                        +--> weight                n is the junction of this weight

B runs the trunk and remembers the gradient that reaches each junction. W runs the junctions again,
towards their weights only: autograd then computes the weight half of each operation. A weight with
one junction waits for W. Any other (used in two places, or by an output that no input leads to)
cannot be cut off cleanly, so its gradient is computed along with B and only added in W.

Bitwise equal to one fused backward pass. `torch.distributed.pipelining` has such a split too, but
it loses or doubles gradients of those other weights and of outputs with hooks (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

Gradients = Sequence[Tensor | None]


@dataclass(slots=True, kw_only=True, eq=False)
class _Junction:
    node: Node
    weights: list[Parameter] = field(default_factory=list)
    gradients: Gradients = ()
    """What reached the node in B, one per output of its forward operation."""


class DeferredWeights:
    """What W of one micro-batch has left to do; keeps the part of the graph that it needs."""

    def __init__(
        self, junctions: list[_Junction], early: Sequence[tuple[Parameter, Tensor | None]]
    ) -> None:
        self._junctions = junctions
        self._early = list(early)

    def run(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yields each weight with its gradient, the last layer's first. Runs once."""
        while self._early:
            weight, gradient = self._early.pop()
            if gradient is not None:
                yield weight, gradient
        while self._junctions:
            # Popped, so that the activations of the layers done are freed on the way.
            yield from _weight_gradients(self._junctions.pop())


def nodes_of(weights: Iterable[Parameter]) -> dict[Node, Parameter]:
    """Where the graph ends for each weight. Looked up once: holding a node keeps it the same."""
    return {get_gradient_edge(weight).node: weight for weight in weights}


def input_gradients(
    outputs: Sequence[tuple[GradientEdge, Tensor]],
    inputs: Sequence[Tensor],
    weights: Mapping[Node, Parameter],
) -> tuple[list[Tensor | None], DeferredWeights]:
    """B. `outputs` are where the stage's results come from, each with its gradient.

    The first list is as long as `inputs`, which must all require a gradient.
    """
    edges = [edge for edge, _ in outputs]
    if not edges:
        return [None] * len(inputs), DeferredWeights([], [])
    junctions, early = _find_junctions(edges, inputs, weights)
    hooks = [junction.node.register_prehook(_remember_in(junction)) for junction in junctions]
    try:
        gradients = torch.autograd.grad(
            edges,
            [*inputs, *early],
            [gradient for _, gradient in outputs],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    of_early = list(zip(early, gradients[len(inputs) :], strict=True))
    return list(gradients[: len(inputs)]), DeferredWeights(junctions, of_early)


def _find_junctions(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], weights: Mapping[Node, Parameter]
) -> tuple[list[_Junction], list[Parameter]]:
    """The junctions, deepest first, and the weights that cannot wait for one."""
    roots = [edge.node for edge in outputs]
    trunk = {get_gradient_edge(tensor).node for tensor in inputs}
    # Off the trunk: the weights that a node leads to. Lists, because most have one at most.
    behind: dict[Node, list[Parameter]] = {}
    used_at: dict[Parameter, list[Node]] = {}
    for node in _leaves_first(roots):
        children = [child for child, _ in node.next_functions if child is not None]
        reached = [weight for child in children for weight in behind.get(child, ())]
        if node in trunk or not trunk.isdisjoint(children):
            trunk.add(node)
            for weight in dict.fromkeys(reached):
                used_at.setdefault(weight, []).append(node)
        else:
            own = weights.get(node)
            behind[node] = list(dict.fromkeys(reached)) if own is None else [own]
    early = dict.fromkeys(weight for root in roots for weight in behind.get(root, ()))
    junctions: dict[Node, _Junction] = {}
    for weight, nodes in used_at.items():
        if len(nodes) > 1:
            early[weight] = None
        elif weight not in early:
            junction = junctions.setdefault(nodes[0], _Junction(node=nodes[0]))
            junction.weights.append(weight)
    return list(junctions.values()), list(early)


def _leaves_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node below `roots` once, after all that it leads to."""
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_expanded = stack.pop()
        if is_expanded:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)


def _remember_in(junction: _Junction) -> Callable[[Gradients], None]:
    def remember(gradients: Gradients) -> None:
        junction.gradients = gradients

    return remember


def _weight_gradients(junction: _Junction) -> Iterator[tuple[Parameter, Tensor]]:
    reached = [
        (GradientEdge(junction.node, number), gradient)
        for number, gradient in enumerate(junction.gradients)
        if gradient is not None
    ]
    if not reached:
        return
    # A user's hook on the activation has run in B already; its effect must not count twice.
    gradients = junction.gradients
    hook = junction.node.register_prehook(lambda _: gradients)
    try:
        computed = torch.autograd.grad(
            [edge for edge, _ in reached],
            junction.weights,
            [gradient for _, gradient in reached],
            allow_unused=True,
        )
    finally:
        hook.remove()
    for weight, gradient in zip(junction.weights, computed, strict=True):
        if gradient is not None:
            yield weight, gradient
