"""The reference equals a loop written out by hand, and the stages equal the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from everstep.execute.boundary import flatten
from everstep.execute.data import Microbatch, SampleOrder, Slicing, fetch
from everstep.execute.split import StageModule, split_model
from everstep.execute.stage import Stage
from everstep.testing.reference import Reference, plain_training

STEPS, SEED = 4, 3


class Images:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(index)), index % 3


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64, 8),
        nn.GELU(),
        nn.Linear(8, 3),
    )


class Sometimes(nn.Module):
    """Uses its second layer never, as a frozen expert would be."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def with_an_unused_layer() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), Sometimes(), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))


def momentum(params: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01)


def reference(build: Callable[[], nn.Module], **options: Any) -> Reference:
    settings: dict[str, Any] = {"batch_size": 12, "steps": STEPS, "seed": SEED, **options}
    optimizer = settings.pop("optimizer", momentum)
    return plain_training(build, functional.cross_entropy, optimizer, Images(), **settings)


def test_the_reference_is_a_plain_loop() -> None:
    torch.manual_seed(SEED)
    model = with_an_unused_layer()
    optimizer = momentum(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    order = SampleOrder(num_samples=20, batch_size=12, seed=SEED)
    losses = []
    for step in range(STEPS):
        x, target = fetch(Images(), order.samples_of_step(step))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    found = reference(
        with_an_unused_layer,
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    assert found.losses == losses
    for key, value in model.state_dict().items():
        assert torch.equal(found.state_dict[key], value), key
    cut = reference(with_an_unused_layer, replicas=2, microbatches=3, num_stages=2, clip_norm=0.5)
    assert cut.losses[0] == pytest.approx(losses[0], rel=1e-5)


def test_the_reference_leaves_the_random_state_alone() -> None:
    state = torch.default_generator.get_state()
    reference(conv_net)
    assert torch.equal(torch.default_generator.get_state(), state)


def run_forward(stages: Sequence[Stage], mb: Microbatch, inputs: Any, target: Any) -> None:
    tensors, structure = flatten(inputs)
    for stage in stages:
        # Copied, as by a wire: a stage may change its input in place.
        tensors = [tensor.clone() for tensor in tensors]
        tensors, structure = stage.forward(mb, tensors, structure, target)


def update(stage: Stage, stepper: Optimizer | None, mbs: Sequence[Microbatch]) -> None:
    for mb in mbs:
        stage.backward_weight(mb)
    for number in range(len(stage.buckets.buckets)):
        stage.buckets.seal(number)
    stage.buckets.drop_unused()
    if stepper is not None:
        stepper.step()


def train_with_stages(
    build: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    *,
    num_stages: int,
    replicas: int,
    microbatches: int,
) -> Reference:
    """What workers do, one after another in one process, decoupled."""
    order = SampleOrder(num_samples=20, batch_size=12, seed=SEED)
    slicing = Slicing(order=order, replicas=replicas, microbatches=microbatches)
    torch.manual_seed(SEED)
    example, _ = fetch(Images(), slicing.samples(Microbatch(0, 0, 0)))
    pieces: list[StageModule] = split_model(build(), num_stages=num_stages, example=example)
    scale = 1 / (replicas * microbatches)
    stages = [
        Stage(
            piece,
            index=index,
            num_stages=num_stages,
            loss=functional.cross_entropy,
            loss_scale=scale,
            seed=SEED,
        )
        for index, piece in enumerate(pieces)
    ]
    steppers = [
        optimizer(stage.buckets.params) if stage.buckets.params else None for stage in stages
    ]
    losses = []
    for step in range(STEPS):
        mbs = [Microbatch(step, r, m) for r in range(replicas) for m in range(microbatches)]
        for mb in mbs:
            run_forward(stages, mb, *fetch(Images(), slicing.samples(mb)))
        for stage in stages:
            stage.buckets.begin()
        for mb in mbs:
            gradients: list[Tensor | None] = []
            for stage in reversed(stages):
                gradients = stage.backward_input(mb, gradients)
        for stage, stepper in zip(stages, steppers, strict=True):
            update(stage, stepper, mbs)
        results = stages[-1].take_results(step)
        losses.append(sum(result.loss for result in results.values()) / len(mbs))
    whole = {key: value for piece in pieces for key, value in piece.state_dict().items()}
    return Reference(losses=losses, state_dict=whole)


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize(("num_stages", "replicas", "microbatches"), [(1, 1, 1), (3, 2, 3)])
@pytest.mark.parametrize("build", [conv_net, with_an_unused_layer])
def test_stages_train_bit_by_bit_as_the_reference_does(
    build: Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    num_stages: int,
    replicas: int,
    microbatches: int,
) -> None:
    grid = {"num_stages": num_stages, "replicas": replicas, "microbatches": microbatches}
    expected = reference(build, optimizer=optimizer, **grid)
    found = train_with_stages(build, optimizer, **grid)
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    assert set(found.state_dict) == set(expected.state_dict)
    for key, value in expected.state_dict.items():
        assert torch.equal(found.state_dict[key], value), key
