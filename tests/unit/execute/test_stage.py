from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everstep.core.errors import ConfigError
from everstep.execute.boundary import flatten
from everstep.execute.data import Microbatch
from everstep.execute.split import StageModule, split_model
from everstep.execute.stage import Stage

FIRST = Microbatch(0, 0, 0)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )


def conv_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def transformer() -> nn.Sequential:
    torch.manual_seed(1)
    layers = (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True) for _ in range(3))
    return nn.Sequential(*layers)


def stages_of(
    model: nn.Module,
    num_stages: int,
    example: Any,
    *,
    loss: Callable[[Any, Any], Any] = mean_square,
    loss_scale: float = 1.0,
    precision: Literal["bf16"] | None = None,
) -> list[Stage]:
    pieces = split_model(model, num_stages=num_stages, example=example)
    return [
        Stage(
            piece,
            index=index,
            num_stages=num_stages,
            loss=loss,
            metrics={"largest": lambda _, target: target.max()},
            loss_scale=loss_scale,
            precision=precision,
            seed=5,
        )
        for index, piece in enumerate(pieces)
    ]


def run_forward(stages: Sequence[Stage], mb: Microbatch, x: Any, target: Any) -> None:
    tensors, structure = flatten(x)
    for stage in stages:
        # Copied, as by a wire: a stage may change its input in place.
        tensors = [tensor.clone() for tensor in tensors]
        tensors, structure = stage.forward(mb, tensors, structure, target)
    assert (tensors, structure) == ([], "")


def run_apart(stages: Sequence[Stage], mb: Microbatch) -> None:
    gradients: list[Tensor | None] = []
    for stage in reversed(stages):
        gradients = stage.backward_input(mb, gradients)
    for stage in stages:
        stage.backward_weight(mb)


def run_fused(stages: Sequence[Stage], mb: Microbatch) -> None:
    gradients: list[Tensor | None] = []
    for stage in reversed(stages):
        gradients = stage.backward_fused(mb, gradients)


def gradients_of(stages: Sequence[Stage]) -> list[Tensor]:
    params = [param for stage in stages for param in stage.module.module.parameters()]
    return [param.grad.clone() for param in params if param.grad is not None]


MODELS: list[tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = [
    (mlp, (3, 4)),
    (conv_net, (3, 1, 4, 4)),
    (transformer, (3, 5, 4)),
]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(("build", "shape"), MODELS)
def test_b_and_w_apart_equal_the_fused_backward_bit_by_bit(
    build: Callable[[], nn.Sequential], shape: tuple[int, ...], num_stages: int
) -> None:
    found = []
    for run in (run_apart, run_fused):
        torch.manual_seed(2)
        stages = stages_of(build(), num_stages, torch.randn(shape), loss_scale=1 / 3)
        for number in range(3):
            mb = Microbatch(0, 0, number)
            x = torch.randn(shape)
            target = torch.randn(shape if build is transformer else (3, 4))
            run_forward(stages, mb, x, target)
            run(stages, mb)
        found.append(gradients_of(stages))
    assert len(found[0]) > 0
    assert all(map(torch.equal, found[0], found[1]))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_gradients_equal_those_of_plain_pytorch(num_stages: int) -> None:
    model = mlp().eval()
    x, target = torch.randn(3, 4), torch.randn(3, 4)
    (mean_square(model(x), target) / 3).backward()  # type: ignore[no-untyped-call]
    expected = [param.grad for param in model.parameters()]
    stages = stages_of(mlp().eval(), num_stages, x, loss_scale=1 / 3)
    run_forward(stages, FIRST, x, target)
    run_apart(stages, FIRST)
    for wanted, found in zip(expected, gradients_of(stages), strict=True):
        assert wanted is not None
        assert torch.equal(wanted, found)


def test_dropout_depends_on_the_key_and_not_on_what_was_drawn_before() -> None:
    stage = stages_of(mlp(), 2, torch.randn(3, 4))[0]
    x, structure = flatten(torch.randn(3, 4))
    torch.manual_seed(0)
    ([first], _), (again, _) = (stage.forward(FIRST, x, structure) for _ in range(2))
    assert torch.equal(first, again[0])
    [other], _ = stage.forward(Microbatch(1, 0, 0), x, structure)
    assert not torch.equal(first, other)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


def test_the_gradients_stay_in_the_flat_buffers() -> None:
    stages = stages_of(mlp(), 2, torch.randn(3, 4))
    for mb, run in ((FIRST, run_apart), (Microbatch(0, 0, 1), run_fused)):
        run_forward(stages, mb, torch.randn(3, 4), torch.randn(3, 4))
        run(stages, mb)
    for stage in stages:
        for param in stage.buckets.params:
            buffer = stage.buckets.buffers[stage.buckets.bucket_of(param)]
            assert param.grad is not None
            assert param.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert param.grad.any()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_parameter_is_reported_ready_once_with_its_final_gradient(
    num_stages: int, is_fused: bool
) -> None:
    stages = stages_of(mlp(), num_stages, torch.randn(3, 4))
    stages[-1].module.module.register_parameter("unused", nn.Parameter(torch.ones(1)))
    last = Stage(
        StageModule(module=stages[-1].module.module, names={}),
        index=num_stages - 1,
        num_stages=num_stages,
        loss=mean_square,
    )
    stages[-1] = last
    run_forward(stages, FIRST, torch.randn(3, 4), torch.randn(3, 4))
    seen: dict[nn.Parameter, Tensor] = {}

    def on_ready(param: nn.Parameter) -> None:
        assert param not in seen
        assert param.grad is not None
        seen[param] = param.grad.clone()

    if is_fused:
        last.backward_fused(FIRST, on_ready=on_ready)
    else:
        last.backward_input(FIRST)
        last.backward_weight(FIRST, on_ready=on_ready)
    assert set(seen) == set(last.buckets.params)
    for param, gradient in seen.items():
        assert param.grad is not None
        assert torch.equal(param.grad, gradient)


def test_activations_are_freed_by_the_last_call_of_a_microbatch() -> None:
    activations: list[weakref.ref[Tensor]] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            activations.append(weakref.ref(y))
            return y * y

    model = nn.Sequential(nn.Linear(4, 4), Watched(), nn.Linear(4, 4), Watched(), nn.Linear(4, 4))
    stages = stages_of(model, 2, torch.randn(3, 4))
    gc.disable()
    try:
        activations.clear()
        run_forward(stages, FIRST, torch.randn(3, 4), torch.randn(3, 4))
        held = [stage.in_flight for stage in stages]
        run_apart(stages, FIRST)
    finally:
        gc.enable()
    assert held == [(FIRST,), (FIRST,)]
    assert [stage.in_flight for stage in stages] == [(), ()]
    assert len(activations) == 2
    assert [ref() for ref in activations] == [None, None]


def test_w_frees_the_activations_of_a_layer_before_it_goes_to_the_next() -> None:
    saved: list[weakref.ref[Tensor]] = []
    model = nn.Sequential(nn.Identity(), *(nn.Linear(4, 4) for _ in range(4)))

    def remember(*args: Any) -> None:
        saved.append(weakref.ref(args[2]))

    stages = stages_of(model, 2, torch.randn(3, 4))
    layers = stages[1].module.module
    for layer in list(layers.children())[:-1]:
        layer.register_forward_hook(remember)
    tensors, structure = stages[0].forward(FIRST, *flatten(torch.randn(3, 4)))
    stages[1].forward(FIRST, tensors, structure, torch.randn(3, 4))
    stages[1].backward_input(FIRST)
    num_alive: list[int] = []
    stages[1].backward_weight(
        FIRST, on_ready=lambda _: num_alive.append(sum(ref() is not None for ref in saved))
    )
    assert num_alive == sorted(num_alive, reverse=True)
    assert num_alive[-1] == 0


def test_an_output_is_not_kept_for_the_sake_of_its_gradient() -> None:
    """An addition saves nothing for its backward pass, so nothing needs to hold its result."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    stage = stages_of(nn.Sequential(Shift(), Shift()), 2, torch.randn(3, 4))[0]
    [output], _ = stage.forward(FIRST, *flatten(torch.randn(3, 4)))
    storage = weakref.ref(output.untyped_storage())
    del output
    assert storage() is None


class Masked(nn.Module):
    """Passes token ids and a float mask along with what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Any]:
        x = value.get("x", 0.0)
        return {
            "x": (x + self.embed(value["ids"])) * value["mask"],
            "ids": value["ids"],
            "mask": value["mask"],
        }


def test_several_tensors_integers_and_masks_pass_between_stages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(), Masked(), Masked())
    value = {"ids": torch.randint(10, (3, 5)), "mask": torch.rand(3, 5, 1)}
    target = torch.randn(3, 5, 4)

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return mean_square(output["x"], target)

    loss(model(value), target).backward()  # type: ignore[no-untyped-call]
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    stages = stages_of(model, 3, value, loss=loss)
    tensors, structure = stages[0].forward(FIRST, *flatten(value))
    assert [tensor.requires_grad for tensor in stages[1]._leaves(tensors, structure)] == [
        True,
        False,
        False,
    ]
    run_forward(stages, FIRST, value, target)
    gradients: list[Tensor | None] = []
    for stage in reversed(stages):
        gradients = stage.backward_input(FIRST, gradients)
        assert [grad is None for grad in gradients[-2:]] == [True, True]
    for stage in stages:
        stage.backward_weight(FIRST)
    for param, wanted in zip(model.parameters(), expected, strict=True):
        assert wanted is not None
        assert param.grad is not None
        assert torch.equal(param.grad, wanted)


def test_a_stage_behind_one_without_parameters_does_its_whole_backward_in_w() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    stages = stages_of(model, 2, torch.randn(3, 4))
    run_forward(stages, FIRST, torch.randn(3, 4), torch.randn(3, 4))
    assert stages[1].backward_input(FIRST) == [None]
    assert not stages[1].buckets.buffers[0].any()
    stages[1].backward_weight(FIRST)
    assert stages[1].buckets.buffers[0].any()
    assert stages[0].backward_input(FIRST, [None]) == [None]
    stages[0].backward_weight(FIRST)
    assert stages[0].buckets.buffers == []


def test_results_are_given_once_per_step() -> None:
    stages = stages_of(mlp(), 1, torch.randn(3, 4))
    other = Microbatch(1, 0, 0)
    for mb in (FIRST, other):
        run_forward(stages, mb, torch.randn(3, 4), torch.randn(3, 4))
    results = stages[0].take_results(0)
    assert list(results) == [FIRST]
    assert results[FIRST].loss > 0
    assert list(results[FIRST].metrics) == ["largest"]
    assert stages[0].take_results(0) == {}
    stages[0].abandon()
    assert stages[0].take_results(1) == {}
    assert stages[0].in_flight == ()


def test_a_shape_that_changes_between_microbatches_is_refused_with_both_shapes() -> None:
    stage = stages_of(mlp(), 2, torch.randn(3, 4))[0]
    stage.forward(FIRST, *flatten(torch.randn(3, 4)))
    with pytest.raises(ConfigError) as caught:
        stage.forward(Microbatch(0, 0, 1), *flatten(torch.randn(2, 4)))
    for part in ("stage 0", "micro-batch 1", "(2, ", "(3, "):
        assert part in str(caught.value)
    assert stage.in_flight == (FIRST,)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    stage = stages_of(mlp(), 1, torch.randn(3, 4), loss=lambda output, _: output)[0]
    with pytest.raises(ConfigError, match=r"of shape \(3, 4\)"):
        stage.forward(FIRST, *flatten(torch.randn(3, 4)), torch.randn(3, 4))


def test_evaluation_keeps_nothing_and_leaves_the_modes_as_they_were() -> None:
    model = conv_net()
    model[1].eval()
    stages = stages_of(model, 2, torch.randn(3, 1, 4, 4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tensors, structure = flatten(torch.randn(7, 1, 4, 4))
    evaluated = None
    for stage in stages:
        evaluated = stage.evaluate(tensors, structure, torch.randn(7, 4))
        tensors, structure = evaluated.tensors, evaluated.structure
    assert evaluated is not None
    assert evaluated.result is not None
    assert evaluated.result.loss > 0
    assert [layer.training for layer in model] == [True, False, True, True, True, True, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(stage.in_flight == () for stage in stages)


def test_bf16_keeps_parameters_and_gradients_in_fp32_and_sends_bf16() -> None:
    stages = stages_of(mlp(), 2, torch.randn(3, 4), precision="bf16")
    run_forward(stages, FIRST, torch.randn(3, 4), torch.randn(3, 4))
    run_apart(stages, FIRST)
    gradients = gradients_of(stages)
    assert {grad.dtype for grad in gradients} == {torch.float32}
    assert all(grad.any() for grad in gradients)
    [output], _ = stages[0].forward(FIRST, *flatten(torch.randn(3, 4)))
    assert output.dtype == torch.bfloat16


def test_bf16_gradients_apart_equal_the_fused_ones() -> None:
    found = []
    for run in (run_apart, run_fused):
        stages = stages_of(transformer(), 3, torch.ones(3, 5, 4), precision="bf16")
        torch.manual_seed(3)
        run_forward(stages, FIRST, torch.randn(3, 5, 4), torch.randn(3, 5, 4))
        run(stages, FIRST)
        found.append(gradients_of(stages))
    assert all(map(torch.equal, found[0], found[1]))


def test_a_stage_that_was_let_go_is_freed_at_once() -> None:
    """The hooks on its parameters lead back to the stage, so its memory stayed until Python looked
    for circles. A helper that replays another stage has no memory to spare for two.
    """
    x, target = torch.randn(3, 4), torch.randn(3, 4)
    stages = stages_of(mlp(), 2, x)
    run_forward(stages, FIRST, x, target)
    run_apart(stages, FIRST)
    run_forward(stages, FIRST, x, target)
    held = [weakref.ref(param) for stage in stages for param in stage.buckets.params]
    gc.disable()
    try:
        for stage in stages:
            stage.let_go()
            assert stage.in_flight == ()
        del stage
        stages.clear()
        assert not any(ref() for ref in held)
    finally:
        gc.enable()
