"""Models that are cut at named submodules. Tracing takes a second, so the traces are shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.core.errors import ConfigError
from everstep.execute.boundary import flatten
from everstep.execute.data import Microbatch
from everstep.execute.split import StageModule, split_model
from everstep.execute.stage import Stage

IDS, MASK = torch.arange(10).view(2, 5), torch.rand(2, 5, 1)
SPLIT = ["layers.1", "layers.2", "layers.3"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.linear(self.norm(x))) * mask
        return x + y


class Model(nn.Module):
    """Two inputs; one of them and the embedding are read by later pieces; two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.unread = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(1))

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        embedded = x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.batch_norm((x + embedded + self.shift).mean(1))
        return {"logits": self.head(x), "last": (x,)}


def build() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def model() -> Model:
    return build()


@pytest.fixture(scope="module")
def stages(model: Model) -> list[StageModule]:
    return split_model(model, num_stages=4, example=[IDS, MASK], split=SPLIT)


def chain(stages: Sequence[StageModule], value: Any) -> Any:
    for stage in stages:
        value = stage.call(value)
    return value


def set_mode(modules: Sequence[nn.Module], *, is_training: bool) -> None:
    for module in modules:
        module.train(is_training)


@pytest.mark.parametrize("is_training", [True, False])
def test_traced_stages_compute_what_the_model_computes_in_either_mode(
    model: Model, stages: list[StageModule], is_training: bool
) -> None:
    set_mode([model, *(stage.module for stage in stages)], is_training=is_training)
    torch.manual_seed(1)
    expected = model(IDS, MASK)
    torch.manual_seed(1)
    found = chain(stages, {"mask": MASK, "ids": IDS})
    assert torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found["last"][0], expected["last"][0])


def test_the_whole_state_comes_together_and_loads_into_a_plain_model(
    model: Model, stages: list[StageModule]
) -> None:
    whole = {key: value for stage in stages for key, value in stage.state_dict().items()}
    assert set(whole) == set(model.state_dict())
    build().load_state_dict(whole)
    of_stages = {param for stage in stages for param in stage.module.parameters()}
    assert of_stages == set(model.parameters())


def test_the_model_itself_is_left_as_it_was() -> None:
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.default_generator.get_state()
    split_model(model, num_stages=2, example=(IDS, MASK), split=["layers.2"])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.default_generator.get_state(), state)
    assert all("forward" not in vars(module) for module in model.modules())


def test_moving_a_traced_stage_moves_what_evaluation_reads() -> None:
    stages = split_model(build(), num_stages=2, example=(IDS, MASK), split=["layers.2"])
    for stage in stages:
        stage.module.to(torch.float64)
    set_mode([stage.module for stage in stages], is_training=False)
    found = chain(stages, (IDS, MASK.double()))
    assert found["logits"].dtype == torch.float64


def test_more_pieces_than_stages_are_joined(model: Model) -> None:
    stages = split_model(model, num_stages=2, example=(IDS, MASK), split=SPLIT)
    assert len(stages) == 2
    set_mode([model, *(stage.module for stage in stages)], is_training=False)
    assert torch.equal(chain(stages, (IDS, MASK))["logits"], model(IDS, MASK)["logits"])


def test_gradients_through_traced_stages_equal_those_of_the_model() -> None:
    plain, mb = build().eval(), Microbatch(0, 0, 0)
    plain(IDS, MASK)["logits"].sum().backward()
    pieces = split_model(build(), num_stages=4, example=(IDS, MASK), split=SPLIT)
    stages = [
        Stage(piece, index=index, num_stages=4, loss=lambda output, _: output["logits"].sum())
        for index, piece in enumerate(pieces)
    ]
    set_mode([piece.module for piece in pieces], is_training=False)
    tensors, structure = flatten((IDS, MASK))
    for stage in stages:
        tensors, structure = stage.forward(mb, tensors, structure, torch.zeros(()))
    gradients: list[Tensor | None] = []
    for stage in reversed(stages):
        gradients = stage.backward_input(mb, gradients)
        stage.backward_weight(mb)
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    for piece in pieces:
        for key, param in piece.module.named_parameters():
            expected = wanted[piece.names[key]]
            assert param.grad is not None
            if expected is not None:
                assert torch.equal(param.grad, expected), piece.names[key]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x)))
        return y


def test_a_weight_tied_across_traced_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"first\.weight \(stage 0\) is second\.weight"):
        split_model(Tied(), num_stages=2, example=torch.ones(2, 4), split=["second"])


def test_a_weight_tied_inside_a_traced_stage_stays_tied() -> None:
    model = Tied()
    stages = split_model(model, num_stages=2, example=torch.ones(2, 4), split=["third"])
    assert set(stages[0].module.parameters()) == {
        model.first.weight,
        model.first.bias,
        model.second.bias,
    }
    assert set(stages[0].state_dict()) | set(stages[1].state_dict()) == set(model.state_dict())


def test_a_parameter_that_two_traced_stages_read_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x) * self.scale) * self.scale
            return y

    with pytest.raises(ConfigError, match="tied"):
        split_model(Shared(), num_stages=2, example=torch.ones(2, 4), split=["second"])


@pytest.mark.parametrize(
    ("split", "rule"),
    [
        (["layer.1"], "the nearest is 'layers.1'"),
        (["layers.1"], "makes 2 pieces, fewer than the 3 stages"),
    ],
)
def test_wrong_split_points_are_refused(split: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        split_model(build(), num_stages=3, example=(IDS, MASK), split=split)


def test_a_model_that_cannot_be_traced_is_refused_with_what_to_do() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            if y.sum() > 0:
                y = y * 2
            z: Tensor = self.second(y)
            return z

    with pytest.raises(ConfigError, match=r"build it as an nn\.Sequential"):
        split_model(Branches(), num_stages=2, example=torch.ones(2, 4), split=["second"])
