"""What a worker keeps of the stages it does not run."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from everstep.execute.outline import filled_in, outline
from everstep.execute.split import StageModule, split_model

HOST = torch.device("cpu")


def two_stages(*layers: nn.Module, example: Tensor) -> list[StageModule]:
    return split_model(nn.Sequential(*layers), num_stages=2, example=example)


def gradients_of(stage: StageModule) -> list[Tensor]:
    return [param.grad for param in stage.module.parameters() if param.grad is not None]


def test_only_the_own_stage_keeps_memory_for_its_parameters() -> None:
    stages = two_stages(nn.Linear(4, 4), nn.Linear(4, 4), example=torch.ones(2, 4))
    shapes = {name: tensor.shape for name, tensor in stages[1].state_dict().items()}
    let_go = [weakref.ref(param) for param in stages[1].module.parameters()]
    outline(stages, keep=stages[0])
    assert not any(ref() for ref in let_go)
    assert all(param.device.type == "cpu" for param in stages[0].module.parameters())
    assert all(param.is_meta for param in stages[1].module.parameters())
    assert {name: tensor.shape for name, tensor in stages[1].state_dict().items()} == shapes


class Tied(nn.Module):
    """One matrix under two names, a table that no state_dict has, and a plain tensor."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.plain = torch.full((4,), 3.0)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(given) + self.table) * self.plain
        return found


class Recurrent(nn.Module):
    """Keeps a list of its parameters beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.cells(given)[0]
        return found


@pytest.mark.parametrize("kind", [Tied, Recurrent, nn.BatchNorm1d])
def test_a_stage_that_is_filled_in_and_loaded_is_what_it_was(kind: type[nn.Module]) -> None:
    example = torch.randn(3, 4, 4)
    other = kind(4) if kind is nn.BatchNorm1d else kind()
    stages = two_stages(nn.Linear(4, 4), other, example=example)
    state = {name: tensor.clone() for name, tensor in stages[1].module.state_dict().items()}
    expected = stages[1].call(example)
    expected.sum().backward()
    gradients = gradients_of(stages[1])
    outline(stages, keep=stages[0])

    again = filled_in(stages[1], device=HOST)
    again.module.load_state_dict(state)
    found = again.call(example)
    found.sum().backward()
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients_of(again), gradients))
    assert all(param.is_meta for param in stages[1].module.parameters()), "it was a copy"


def test_frozen_parameters_stay_frozen() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    stages = two_stages(nn.Linear(4, 4), frozen, example=torch.ones(2, 4))
    outline(stages, keep=stages[0])
    again = filled_in(stages[1], device=HOST)
    assert not any(param.requires_grad for param in again.module.parameters())


def test_buffers_stay_since_two_stages_may_share_them() -> None:
    shared = nn.BatchNorm1d(4, affine=False)
    stages = two_stages(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, example=torch.ones(2, 4))
    outline(stages, keep=stages[0])
    stages[0].call(torch.randn(2, 4))
    assert all(buffer.device.type == "cpu" for buffer in stages[0].module.buffers())


def test_what_cannot_be_copied_says_so() -> None:
    odd = nn.Linear(4, 4)
    odd.lock = threading.Lock()  # type: ignore[assignment]
    stages = two_stages(nn.Linear(4, 4), odd, example=torch.ones(2, 4))
    outline(stages, keep=stages[0])
    with pytest.raises(TypeError):
        filled_in(stages[1], device=HOST)
