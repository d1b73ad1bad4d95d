from __future__ import annotations

import torch
from torch.nn import functional

from everstep.execute.boundary import flatten
from everstep.execute.data import Microbatch
from everstep.execute.split import split_model
from everstep.execute.stage import Stage
from everstep.testing.emulate import emulated_model, sleep_for

F_S, B_S, W_S = 1.0, 2.0, 4.0
MB = Microbatch(0, 0, 0)


def emulated_stages(num_stages: int) -> tuple[list[Stage], list[float]]:
    paid: list[float] = []
    model = emulated_model(num_stages, F_S, B_S, W_S, sleep=paid.append)
    pieces = split_model(model, num_stages=num_stages, example=torch.zeros(2, 8))
    stages = [
        Stage(piece, index=index, num_stages=num_stages, loss=functional.mse_loss)
        for index, piece in enumerate(pieces)
    ]
    paid.clear()
    return stages, paid


def test_each_phase_pays_its_own_time() -> None:
    (first, last), paid = emulated_stages(2)
    tensors, structure = first.forward(MB, *flatten(torch.zeros(2, 8)))
    last.forward(MB, tensors, structure, torch.ones(2, 8))
    assert paid == [F_S, F_S]
    paid.clear()
    gradients = last.backward_input(MB)
    assert paid == [B_S]
    paid.clear()
    last.backward_weight(MB)
    assert paid == [W_S]
    paid.clear()
    first.backward_input(MB, gradients)
    assert paid == []
    first.backward_weight(MB)
    assert paid == [W_S + B_S]


def test_a_fused_backward_pays_both() -> None:
    (first, last), paid = emulated_stages(2)
    tensors, structure = first.forward(MB, *flatten(torch.zeros(2, 8)))
    last.forward(MB, tensors, structure, torch.ones(2, 8))
    paid.clear()
    last.backward_fused(MB)
    assert sorted(paid) == [B_S, W_S]


def test_an_emulated_model_has_one_layer_per_stage_and_real_gradients() -> None:
    stages, _ = emulated_stages(1)
    stages[0].forward(MB, *flatten(torch.zeros(2, 8)), torch.ones(2, 8))
    stages[0].backward_input(MB)
    stages[0].backward_weight(MB)
    assert stages[0].buckets.buckets[0].gradients.all()
    assert len(emulated_stages(5)[0]) == 5


def test_sleeping_no_time_returns_at_once() -> None:
    sleep_for(0.0)
