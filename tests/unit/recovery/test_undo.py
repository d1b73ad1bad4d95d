"""Undo on its own: first steps, records, schedulers, copies, refusals, and what it reports."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from everstep.core.errors import CannotUndo, ConfigError
from everstep.recovery.undo import (
    Keep,
    NotUndoable,
    StepRecord,
    Undoable,
    UndoReport,
    check_undoable,
    remember,
    undo,
)
from everstep.recovery.undo_adam import LAMB
from everstep.recovery.undo_tally import CANCELLATION_LIMIT, Look, Tally

Params = list[torch.nn.Parameter]


def make_params(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 6), (5, 3)]
    return [
        torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.3).to(dtype))
        for shape in shapes
    ]


def set_grads(params: Iterable[Tensor], *, seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 0.1).to(param.dtype)


def take_steps(optimizer: torch.optim.Optimizer, params: Params, *, num_steps: int) -> None:
    for seed in range(num_steps):
        set_grads(params, seed=seed)
        optimizer.step()


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], dict[str, Any]]:
    params = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return params, copy.deepcopy(optimizer.state_dict())


def assert_back(
    optimizer: torch.optim.Optimizer,
    before: tuple[list[Tensor], dict[str, Any]],
    *,
    is_bitwise: bool = False,
) -> None:
    params, state = snapshot(optimizer)
    rtol, atol = (0.0, 0.0) if is_bitwise else (1e-6, 1e-7)
    torch.testing.assert_close(params, before[0], rtol=rtol, atol=atol)
    assert state["state"].keys() == before[1]["state"].keys()
    rtol, atol = (0.0, 0.0) if is_bitwise else (1e-4, 1e-6)
    for key, entries in before[1]["state"].items():
        assert state["state"][key].keys() == entries.keys()
        torch.testing.assert_close(state["state"][key], entries, rtol=rtol, atol=atol)
    assert state["param_groups"] == before[1]["param_groups"]


class Lamb(torch.optim.Optimizer):
    """A small LAMB that leaves the trust ratio of each tensor in its state."""

    def __init__(self, params: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
                update = mean / (root + group["eps"]) + group["weight_decay"] * param
                state["trust_ratio"] = (param.norm() / update.norm()).item()
                param.sub_(update, alpha=group["lr"] * state["trust_ratio"])


FIRST_STEP_CASES = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Muon, {}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize(("optimizer_class", "settings"), FIRST_STEP_CASES)
def test_undoing_the_first_step_leaves_the_state_as_it_was_before_any(
    optimizer_class: type[torch.optim.Optimizer], settings: dict[str, Any], has_record: bool
) -> None:
    params = make_params()
    optimizer = optimizer_class(params, **settings)
    before = snapshot(optimizer)
    record = remember(optimizer) if has_record else None
    take_steps(optimizer, params, num_steps=1)
    undo(optimizer, record=record)
    assert_back(optimizer, before)
    if optimizer_class is not torch.optim.Adagrad:
        assert len(optimizer.state) == 0


def test_the_second_step_of_momentum_is_not_taken_for_the_first() -> None:
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    take_steps(optimizer, params, num_steps=1)
    before = snapshot(optimizer)
    take_steps(optimizer, params, num_steps=1)
    undo(optimizer)
    assert_back(optimizer, before)


def test_without_a_record_only_momentum_that_its_first_step_made_is_dropped() -> None:
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    set_grads(params[:1], seed=0)
    optimizer.step()
    before = snapshot(optimizer)
    take_steps(optimizer, params, num_steps=1)
    undo(optimizer)
    assert_back(optimizer, before)
    assert list(optimizer.state) == params[:1]


def test_an_empty_parameter_does_not_stand_in_the_way_of_an_undo() -> None:
    """Without a record the first step of momentum is told by the largest element of what came
    back; an empty parameter has none, and the undo ended in torch's error about that, halfway."""
    params = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.empty(0))]
    before = params[0].detach().clone()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    undo(optimizer)
    torch.testing.assert_close(params[0].detach(), before)
    assert params[0] not in optimizer.state


def test_foreach_nesterov_gives_the_gradient_back_that_torch_overwrote() -> None:
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    take_steps(optimizer, params, num_steps=2)
    set_grads(params, seed=9)
    grads = [param.grad.clone() for param in params if param.grad is not None]
    optimizer.step()
    undo(optimizer)
    for param, grad in zip(params, grads, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_gradients_are_left_alone_so_that_the_step_can_be_repeated_with_scaled_ones() -> None:
    params, twins = make_params(), make_params()
    optimizer, twin = torch.optim.AdamW(params), torch.optim.AdamW(twins)
    take_steps(optimizer, params, num_steps=3)
    take_steps(twin, twins, num_steps=3)
    set_grads(params, seed=9)
    set_grads(twins, seed=9)
    optimizer.step()
    undo(optimizer)
    for param in [*params, *twins]:
        assert param.grad is not None
        param.grad.mul_(0.25)
    optimizer.step()
    twin.step()
    for param, other in zip(params, twins, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


def test_parameters_without_gradient_and_several_groups_are_respected() -> None:
    params, others = make_params(), make_params(seed=1)
    groups = [
        {"params": params, "lr": 0.01},
        {"params": others, "lr": 0.1, "betas": (0.5, 0.9), "maximize": True},
    ]
    optimizer = torch.optim.Adam(groups, weight_decay=0.01)
    take_steps(optimizer, params + others, num_steps=2)
    set_grads(params + others, seed=7)
    params[0].grad = None
    others[1].grad = None
    before = snapshot(optimizer)
    optimizer.step()
    report = undo(optimizer)
    assert_back(optimizer, before)
    assert report.num_tensors == 2
    assert report.num_elements == params[1].numel() + others[0].numel()


def test_parameters_at_different_steps_are_each_taken_back_by_their_own_counter() -> None:
    params = make_params()
    optimizer = torch.optim.NAdam(params)
    take_steps(optimizer, params, num_steps=3)
    params[0].grad = None
    optimizer.step()
    set_grads(params, seed=8)
    before = snapshot(optimizer)
    optimizer.step()
    undo(optimizer)
    assert_back(optimizer, before)
    assert [optimizer.state[param]["step"].item() for param in params] == [3, 4]


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=20
        ),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            milestones=[2],
        ),
    ],
)
@pytest.mark.parametrize("has_tensor_lr", [False, True])
def test_a_record_takes_the_scheduler_back_and_undoes_with_the_lr_that_was_used(
    make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler], has_tensor_lr: bool
) -> None:
    params = make_params()
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.01) if has_tensor_lr else 0.01)
    scheduler = make_scheduler(optimizer)
    for seed in range(2):
        set_grads(params, seed=seed)
        optimizer.step()
        scheduler.step()
    set_grads(params, seed=5)
    before, scheduler_before = snapshot(optimizer), copy.deepcopy(scheduler.state_dict())
    record = remember(optimizer, scheduler=scheduler)
    optimizer.step()
    scheduler.step()
    undo(optimizer, record=record)
    assert_back(optimizer, before)
    assert str(scheduler.state_dict()) == str(scheduler_before)


def test_without_a_record_the_lr_that_was_used_can_be_named() -> None:
    params = make_params()
    optimizer = torch.optim.SGD(params, lr=0.5)
    before = snapshot(optimizer)
    take_steps(optimizer, params, num_steps=1)
    optimizer.param_groups[0]["lr"] = 0.1
    undo(optimizer, lr=[0.5])
    assert_back(optimizer, before)
    with pytest.raises(ConfigError, match="one for each of 1 groups"):
        undo(optimizer, lr=[0.1, 0.2])


def test_a_record_without_copies_holds_no_tensor() -> None:
    params = make_params()
    optimizer = torch.optim.AdamW(params)
    take_steps(optimizer, params, num_steps=1)
    record = remember(optimizer)
    assert record.num_bytes_kept == 0
    assert record.copies == {}


def test_a_record_of_another_optimizer_is_refused() -> None:
    record = remember(torch.optim.SGD(make_params()))
    with pytest.raises(ConfigError, match="of this optimizer"):
        undo(torch.optim.SGD(make_params()), record=record)


def test_amsgrad_with_kept_maxima_brings_them_back_to_the_bit() -> None:
    params = make_params()
    optimizer = torch.optim.Adam(params, amsgrad=True)
    take_steps(optimizer, params, num_steps=3)
    before = snapshot(optimizer)
    maxima = [optimizer.state[param]["max_exp_avg_sq"].clone() for param in params]
    record = remember(optimizer, keep=Keep.MISSING)
    assert record.num_bytes_kept == sum(param.nbytes for param in params)
    for param in params:
        assert param.grad is not None
        param.grad.mul_(10)
    optimizer.step()
    undo(optimizer, record=record)
    assert_back(optimizer, before)
    for param, maximum in zip(params, maxima, strict=True):
        assert torch.equal(optimizer.state[param]["max_exp_avg_sq"], maximum)


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_copy_of_everything_brings_any_optimizer_back_to_the_bit(
    optimizer_class: type[torch.optim.Optimizer], settings: dict[str, Any], num_steps: int
) -> None:
    params = make_params()
    optimizer = optimizer_class(params, **settings)
    take_steps(optimizer, params, num_steps=num_steps)
    before = snapshot(optimizer)
    record = remember(optimizer, keep=Keep.EVERYTHING)
    for _ in range(2):  # a record outlives an undo: the same step can be tried again
        set_grads(params, seed=11)
        optimizer.step()
        report = undo(optimizer, record=record)
        assert_back(optimizer, before, is_bitwise=True)
        assert report.num_from_copies == len(params)


def test_lbfgs_with_its_lists_of_tensors_comes_back_to_the_bit() -> None:
    params = make_params()
    optimizer = torch.optim.LBFGS(params, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum((param**4).sum() for param in params)  # type: ignore[assignment]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    before = snapshot(optimizer)
    record = remember(optimizer, keep=Keep.MISSING)
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    undo(optimizer, record=record)
    assert_back(optimizer, before, is_bitwise=True)


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.Adamax, {"weight_decay": 0.1}),
        (torch.optim.Adadelta, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {"weight_decay": 0.1}),
        (torch.optim.RMSprop, {"weight_decay": 0.1, "centered": True}),
        (torch.optim.NAdam, {"weight_decay": 0.1}),
    ],
)
def test_keeping_what_is_missing_helps_every_optimizer_that_needs_it(
    optimizer_class: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    params = make_params()
    optimizer = optimizer_class(params, **settings)
    take_steps(optimizer, params, num_steps=3)
    before = snapshot(optimizer)
    record = remember(optimizer, keep=Keep.MISSING)
    assert record.num_bytes_kept == sum(param.nbytes for param in params)
    set_grads(params, seed=11)
    optimizer.step()
    undo(optimizer, record=record)
    assert_back(optimizer, before)


@pytest.mark.parametrize(
    ("optimizer", "word"),
    [
        (torch.optim.Adam(make_params(), amsgrad=True), "amsgrad=True"),
        (torch.optim.Adamax(make_params()), "maximum"),
        (torch.optim.Rprop(make_params()), "Rprop"),
        (torch.optim.LBFGS(make_params()), "LBFGS"),
        (torch.optim.Adadelta(make_params(), weight_decay=0.1), "weight_decay=0.1"),
        (torch.optim.SGD(make_params(), lr=10.0, weight_decay=0.1), "lr=10.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_optimizer_without_inverse_is_refused_early_with_the_setting_and_a_way_out(
    optimizer: torch.optim.Optimizer, word: str
) -> None:
    verdict = check_undoable(optimizer)
    assert isinstance(verdict, NotUndoable)
    assert verdict.optimizer == type(optimizer).__name__
    assert word in verdict.reason
    assert "remember(..., keep=" in verdict.what_to_do
    with pytest.raises(CannotUndo, match=type(optimizer).__name__):
        remember(optimizer)


def test_a_subclass_is_not_trusted_to_step_like_its_parent() -> None:
    class MyAdam(torch.optim.Adam):
        pass

    assert isinstance(check_undoable(MyAdam(make_params())), NotUndoable)


def test_cautions_name_what_may_spoil_an_undo() -> None:
    assert check_undoable(torch.optim.AdamW(make_params())) == Undoable()
    verdict = check_undoable(torch.optim.RMSprop(make_params(), weight_decay=0.1))
    assert isinstance(verdict, Undoable)
    assert "weight_decay=0.1" in verdict.cautions[0]
    verdict = check_undoable(torch.optim.AdamW(make_params(dtype=torch.bfloat16)))
    assert isinstance(verdict, Undoable)
    assert "torch.bfloat16" in verdict.cautions[0]


def test_an_ill_conditioned_inverse_is_refused_before_anything_changes() -> None:
    params = make_params()
    optimizer = torch.optim.Adagrad(params, lr=0.1, weight_decay=0.1)
    take_steps(optimizer, params, num_steps=1)
    # lr * weight_decay equals the root of the sum: the step moved this element to zero.
    optimizer.state[params[1]]["sum"][0, 0] = (0.1 * 0.1) ** 2
    before = snapshot(optimizer)
    with pytest.raises(CannotUndo, match="magnify rounding"):
        undo(optimizer)
    assert_back(optimizer, before, is_bitwise=True)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_with_gradients_that_are_not_finite_cannot_be_undone_and_says_so(
    optimizer_class: type[torch.optim.Optimizer], num_steps: int, poison: float
) -> None:
    params = make_params()
    optimizer = optimizer_class(params, lr=0.1)  # type: ignore[call-arg]
    take_steps(optimizer, params, num_steps=num_steps)
    assert (params[0].grad is None) == (num_steps == 0)
    set_grads(params, seed=4)
    params[1].grad[0, 0] = poison  # type: ignore[index]
    optimizer.step()
    with pytest.raises(CannotUndo, match="NaN or infinity"):
        undo(optimizer)


def test_many_finite_gradients_in_half_precision_are_not_taken_for_infinity() -> None:
    """Gradients on the processor were summed in their own type to find NaN and infinity.

    The sum of 70,000 ones passes the largest float16, 65,504: undo refused a step that was fine.
    """
    params = [torch.nn.Parameter(torch.zeros(70_000, dtype=torch.float16))]
    params[0].grad = torch.ones_like(params[0])
    optimizer = torch.optim.SGD(params, lr=0.5)
    optimizer.step()
    undo(optimizer)
    assert not params[0].any()


def test_a_look_that_a_device_still_works_on_is_read_with_the_next_one() -> None:
    def tensors(*values: float) -> list[Tensor]:
        return [torch.tensor([value]) for value in values]

    limit = CANCELLATION_LIMIT
    spike = Look(
        ratios=tensors(1.0, 3 * limit),
        largest=torch.tensor(3 * limit),
        remaining=tensors(1.0, 1.0),
        scale=0.5,
    )
    tally = Tally(pending=spike)
    tally.note_cancellation(tensors(0.0, 4.0), tensors(0.0, 2.0), scale=1.0)
    assert (tally.largest_cancellation, tally.num_cancelled) == (1.5 * limit, 1)
    assert tally.pending is None
    assert tally.is_finite


def test_there_must_be_a_step_to_undo() -> None:
    params = make_params()
    set_grads(params, seed=0)
    with pytest.raises(CannotUndo, match="no step to undo"):
        undo(torch.optim.Adam(params))
    with pytest.raises(CannotUndo, match="no step to undo"):
        undo(torch.optim.Adagrad(params))
    with pytest.raises(CannotUndo, match="no step to undo"):
        undo(torch.optim.SGD(params, momentum=0.9))


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    with pytest.raises(CannotUndo, match="sparse"):
        undo(optimizer)


def test_a_gradient_spike_is_measured_and_reported_and_second_moments_stay_positive() -> None:
    params = make_params()
    optimizer = torch.optim.Adam(params)
    take_steps(optimizer, params, num_steps=20)
    quiet = step_and_undo(optimizer, params, scale=1.0)
    assert quiet.warning is None
    assert 0 < quiet.largest_cancellation < 1
    spike = step_and_undo(optimizer, params, scale=1e5)
    assert spike.largest_cancellation > 1e3
    assert 0 < spike.num_cancelled <= spike.num_elements
    assert spike.warning is not None
    assert f"{spike.num_cancelled} of {spike.num_elements}" in spike.warning
    assert all(bool((optimizer.state[param]["exp_avg_sq"] >= 0).all()) for param in params)


def step_and_undo(optimizer: torch.optim.Optimizer, params: Params, *, scale: float) -> UndoReport:
    set_grads(params, seed=30)
    for param in params:
        assert param.grad is not None
        param.grad.mul_(scale)
    optimizer.step()
    return undo(optimizer)


def test_elements_that_never_had_a_gradient_do_not_count_as_cancelled() -> None:
    params = make_params()
    optimizer = torch.optim.Adam(params)
    for seed in range(3):
        set_grads(params, seed=seed)
        params[0].grad[0] = 0.0  # type: ignore[index]
        optimizer.step()
    report = undo(optimizer)
    assert math.isfinite(report.largest_cancellation)
    assert bool((optimizer.state[params[0]]["exp_avg_sq"][0] == 0).all())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_third_party_lamb_is_undone_by_the_rule_it_is_given(weight_decay: float) -> None:
    params = make_params()
    optimizer = Lamb(params, lr=0.01, weight_decay=weight_decay)
    assert isinstance(check_undoable(optimizer), NotUndoable)
    assert check_undoable(optimizer, rule=LAMB) == Undoable()
    take_steps(optimizer, params, num_steps=3)
    before, _ = snapshot(optimizer)
    moments = copy.deepcopy([optimizer.state[param]["exp_avg_sq"] for param in params])
    record: StepRecord = remember(optimizer, rule=LAMB)
    set_grads(params, seed=12)
    optimizer.step()
    undo(optimizer, record=record, rule=LAMB)
    torch.testing.assert_close([p.detach() for p in params], before, rtol=1e-6, atol=1e-7)
    for param, moment in zip(params, moments, strict=True):
        assert optimizer.state[param]["step"] == 3
        torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"], moment)


def test_large_tensors_are_taken_back_in_pieces() -> None:
    params = [torch.nn.Parameter(torch.randn(700_001) * 0.1)]
    optimizer = torch.optim.AdamW(params, maximize=True)
    take_steps(optimizer, params, num_steps=1)
    before = snapshot(optimizer)
    set_grads(params, seed=3)
    optimizer.step()
    undo(optimizer)
    assert_back(optimizer, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("capturable", [False, True])
def test_on_a_device_each_of_several_batches_comes_back_and_is_counted(capturable: bool) -> None:
    params = [torch.nn.Parameter(torch.randn(12_000_000, device="cuda") * 0.1) for _ in range(4)]
    optimizer = torch.optim.Adam(params, capturable=capturable)
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    before = snapshot(optimizer)
    for param in params:
        assert param.grad is not None
        param.grad[7] = 10.0
    optimizer.step()
    report = undo(optimizer)
    assert report.num_cancelled == len(params)
    torch.testing.assert_close([p.detach() for p in params], before[0], rtol=1e-6, atol=1e-7)
    assert all(optimizer.state[param]["step"].item() == 1 for param in params)


def test_complex_and_oddly_laid_out_parameters_come_back() -> None:
    params = [
        torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)),
        torch.nn.Parameter(torch.randn(5, 6).T),
    ]
    optimizer = torch.optim.Adam(params)
    before = snapshot(optimizer)
    for seed in range(2):
        before = snapshot(optimizer)
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.1
        optimizer.step()
    undo(optimizer)
    assert_back(optimizer, before)


def test_tensor_betas_and_lr_of_a_capturable_like_setup_are_read_as_numbers() -> None:
    params = make_params()
    optimizer = torch.optim.Adam(
        params,
        lr=torch.tensor(0.01),
        betas=(torch.tensor(0.9), torch.tensor(0.99)),
        foreach=False,
    )
    take_steps(optimizer, params, num_steps=1)
    before = [param.detach().clone() for param in params]
    set_grads(params, seed=2)
    optimizer.step()
    undo(optimizer)
    torch.testing.assert_close([p.detach() for p in params], before, rtol=1e-6, atol=1e-7)
