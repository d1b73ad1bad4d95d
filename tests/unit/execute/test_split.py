from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from everstep.core.errors import ConfigError
from everstep.execute.boundary import flatten, unflatten
from everstep.execute.split import StageModule, balance, split_model


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.Sequential(
            nn.BatchNorm1d(8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        ),
        nn.Sequential(OrderedDict(body=nn.Linear(8, 8), head=nn.Linear(8, 4))),
    )


def chain(stages: Sequence[StageModule], value: Tensor) -> Tensor:
    for stage in stages:
        value = stage.call(value)
    return value


def test_stages_of_nested_sequentials_compute_the_same_under_the_same_names() -> None:
    model, x = nested().eval(), torch.randn(3, 4)
    stages = split_model(model, num_stages=3, example=x)
    assert torch.equal(chain(stages, x), model(x))
    whole = {key: value for stage in stages for key, value in stage.state_dict().items()}
    assert list(whole) == list(model.state_dict())
    fresh = nested()
    fresh.load_state_dict(whole)
    assert torch.equal(fresh.eval()(x), model(x))


def test_the_slices_are_balanced_by_operations_not_by_number_of_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Linear(8, 8) for _ in range(4)))
    model[1] = nn.Linear(64, 8)
    stages = split_model(model, num_stages=2, example=torch.randn(16, 64))
    assert [len(list(stage.module.children())) for stage in stages] == [1, 4]


def test_counting_operations_leaves_no_trace() -> None:
    model = nested()
    model.get_submodule("1.2").eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(4)
    state = torch.default_generator.get_state()
    split_model(model, num_stages=2, example=torch.randn(3, 4, generator=torch.Generator()))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.default_generator.get_state(), state)
    assert all(param.grad is None for param in model.parameters())


def test_a_sequential_with_a_forward_of_its_own_is_one_layer() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return x + y

    model = nn.Sequential(Residual(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    stages = split_model(model, num_stages=2, example=x)
    assert torch.equal(chain(stages, x), model(x))
    with pytest.raises(ConfigError, match="at most 2"):
        split_model(model, num_stages=3, example=x)


def test_one_stage_is_the_model_itself() -> None:
    class TwoInputs(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    model = TwoInputs()
    [stage] = split_model(model, num_stages=1, example=None)
    assert stage.module is model
    a, b = torch.ones(2), torch.zeros(2)
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        assert torch.equal(stage.call(inputs), a)


def test_parameters_tied_across_stages_are_refused_by_both_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight \(stage 0\) is 2\.weight \(stage 2\)"):
        split_model(model, num_stages=3, example=torch.randn(3, 4))


def test_parameters_tied_inside_a_stage_are_kept_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64))
    model[1].weight = model[0].weight
    stages = split_model(model, num_stages=2, example=torch.randn(3, 4))
    assert set(stages[0].state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


CASES: list[tuple[Callable[[], list[StageModule]], str]] = [
    (lambda: split_model(nested(), num_stages=0, example=None), "at least 1"),
    (lambda: split_model(nested(), num_stages=8, example=torch.ones(3, 4)), "at most 7"),
    (lambda: split_model(Branching(), num_stages=2, example=None), "split= must name"),
]


@pytest.mark.parametrize(("split", "rule"), CASES)
def test_what_cannot_be_split_is_refused_with_the_rule(
    split: Callable[[], list[StageModule]], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        split()


def test_balance_minimises_the_largest_slice() -> None:
    assert balance([1, 1, 1, 9, 1, 1, 1], 3) == [range(3), range(3, 4), range(4, 7)]
    assert balance([5], 1) == [range(1)]
    assert balance([0, 0, 0], 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(ConfigError, match="between 1 and 2"):
        balance([1, 2], 3)


def test_a_structure_says_where_gradients_flow_and_checks_the_number_of_tensors() -> None:
    needs, plain = torch.ones(1, requires_grad=True), torch.ones(1)
    tensors, structure = flatten({"a": (needs, None), "b": [plain, 0.5]})
    assert structure == '{"a":["tuple",1,null],"b":["list",0,["constant",0.5]]}'
    assert unflatten(tensors, structure) == {"a": (needs, None), "b": [plain, 0.5]}
    with pytest.raises(ValueError, match="1 fewer"):
        unflatten([*tensors, plain], structure)
    with pytest.raises(ValueError, match="fewer tensors"):
        unflatten(tensors[:1], structure)
    with pytest.raises(ConfigError, match="a set"):
        flatten({1, 2})
