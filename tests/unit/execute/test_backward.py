"""B and W apart must give bitwise what one backward pass gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from everstep.execute.backward import input_gradients, nodes_of


class TiedInside(nn.Module):
    """One weight in two layers, with another between them, and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first_bias = nn.Parameter(torch.randn(4))
        self.second_bias = nn.Parameter(torch.randn(4))
        self.between = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(x, self.weight, self.first_bias).tanh()
        x = self.between(x).tanh()
        return functional.linear(x, self.weight, self.second_bias)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(4):
            state = self.cell(x, state)
        return state


class SideOutput(nn.Module):
    """An output that does not depend on the input, one that needs no gradient, one passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return y * self.scale, self.scale.exp(), y.argmax(-1), y.detach(), x, self.layer.bias


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        y.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return y.tanh()


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.query = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(self.query(x), x, x)[0]
        return y


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 16, dropout=0.0, batch_first=True)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 3)
    )


def weight_normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.GELU(), nn.Linear(4, 4)
    )


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(block(), block()), (2, 5, 4)),
    (conv_net, (2, 3, 6, 6)),
    (weight_normed, (3, 4)),
    (TiedInside, (3, 4)),
    (Recurrent, (3, 4)),
    (SideOutput, (3, 4)),
    (Hooked, (3, 4)),
    (CrossAttention, (2, 5, 4)),
    (nn.Identity, (3, 4)),
]


def outputs_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    found: Any = module(x)
    outputs = list(found) if isinstance(found, tuple) else [found]
    return [output for output in outputs if output.requires_grad]


@pytest.mark.parametrize(("build", "shape"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_b_and_w_apart_equal_one_backward_pass(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    module = build()
    x = torch.randn(shape, requires_grad=True)
    outputs = outputs_of(module, x)
    gradients = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, gradients)
    expected = {name: param.grad for name, param in module.named_parameters()}

    leaf = x.detach().requires_grad_()
    again = outputs_of(module, leaf)
    roots = [(get_gradient_edge(out), grad) for out, grad in zip(again, gradients, strict=True)]
    (of_input,), deferred = input_gradients(roots, [leaf], nodes_of(module.parameters()))
    of_weights = dict(deferred.run())

    assert of_input is not None
    assert x.grad is not None
    assert torch.equal(of_input, x.grad)
    for name, param in module.named_parameters():
        wanted = expected[name]
        if wanted is None:
            assert param not in of_weights
        else:
            assert torch.equal(of_weights[param], wanted), name


def test_weights_come_in_the_order_a_backward_pass_finishes_layers() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    root = (get_gradient_edge(module(x)), torch.ones(3, 4))
    _, deferred = input_gradients([root], [x], nodes_of(module.parameters()))
    layer_of = {param: name.split(".")[0] for name, param in module.named_parameters()}
    assert [layer_of[param] for param, _ in deferred.run()] == ["4", "4", "2", "2", "0", "0"]


def test_without_any_output_gradient_there_is_nothing_to_do() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    gradients, deferred = input_gradients([], [x], nodes_of(nn.Linear(4, 4).parameters()))
    assert gradients == [None]
    assert list(deferred.run()) == []
