"""The table of undo rules, and the inverses of the optimizers outside the Adam family.

Knows nothing of records, copies or which tensors belong together. In every rule the batch holds the
values after the step, and nothing but the batch's own tensors is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everstep.recovery.undo_adam import ADAM, ADAMAX, NADAM, RADAM
from everstep.recovery.undo_batches import Batch, Hyper
from everstep.recovery.undo_rule import (
    PARAM,
    Obstacle,
    Obstacles,
    Rule,
    Scalars,
    amplification,
    coupled_obstacles,
    decayed_grads,
    root_plus_eps,
    undo_average,
    undo_decoupled_decay,
    undo_divided_update,
    undo_square_average,
)


def _undo_sgd(batch: Batch) -> None:
    momentum, decay = batch.hyper["momentum"], batch.hyper["weight_decay"]
    if momentum == 0:
        if not batch.has_params:
            torch._foreach_add_(batch.params, batch.grads, alpha=batch.lr)
            undo_decoupled_decay(batch)
        return
    buffers = batch.state["momentum_buffer"]
    if batch.hyper["nesterov"] and _overwrites_grads(batch.hyper):
        torch._foreach_sub_(batch.grads, buffers, alpha=momentum)
    if not batch.has_params:
        torch._foreach_add_(
            batch.params, buffers, alpha=batch.lr * (momentum if batch.hyper["nesterov"] else 1)
        )
        if batch.hyper["nesterov"]:
            torch._foreach_add_(batch.params, batch.grads, alpha=batch.lr)
            undo_decoupled_decay(batch)
    if not batch.is_first:
        grads = decayed_grads(batch, decay=decay)
        torch._foreach_sub_(buffers, grads, alpha=1 - batch.hyper["dampening"])
        torch._foreach_div_(buffers, momentum)


def _overwrites_grads(hyper: Hyper) -> bool:
    """Whether torch's foreach Nesterov left the look-ahead direction in p.grad itself."""
    return bool(hyper["foreach"]) and hyper["weight_decay"] == 0 and not hyper["maximize"]


def _sgd_was_first(param: Tensor, state: Mapping[str, Any], hyper: Hyper) -> Tensor:
    """The first step sets the buffer to the decayed gradient, whatever the dampening."""
    assert param.grad is not None
    grad = -param.grad if hyper["maximize"] else param.grad
    applied = grad.add(param, alpha=hyper["weight_decay"])
    rest = (state["momentum_buffer"] * hyper["momentum"]).sub_(applied, alpha=hyper["dampening"])
    return _is_noise(rest, beside=applied)


def _is_noise(rest: Tensor, *, beside: Tensor) -> Tensor:
    limit = 16 * torch.finfo(beside.dtype).eps
    return rest.abs().max() <= limit * beside.abs().max()


def _undo_rmsprop(batch: Batch) -> None:
    alpha, momentum = batch.hyper["alpha"], batch.hyper["momentum"]
    roots, decay = _rmsprop_roots(batch), batch.hyper["weight_decay"]
    if not batch.has_params and momentum > 0:
        torch._foreach_add_(batch.params, batch.state["momentum_buffer"], alpha=batch.lr)
    elif not batch.has_params:
        undo_divided_update(batch, batch.grads, roots, size=batch.lr, pull=batch.lr * decay)
    if batch.is_first:
        return
    grads = decayed_grads(batch, decay=decay)
    if momentum > 0:
        torch._foreach_addcdiv_(batch.state["momentum_buffer"], grads, roots, value=-1)
        torch._foreach_div_(batch.state["momentum_buffer"], momentum)
    if batch.hyper["centered"]:
        undo_average(batch.state["grad_avg"], grads, beta=alpha)
    undo_square_average(batch.state["square_avg"], grads, beta=alpha, batch=batch)


def _rmsprop_roots(batch: Batch) -> list[Tensor]:
    squares = batch.state["square_avg"]
    if batch.hyper["centered"]:
        means = batch.state["grad_avg"]
        squares = list(torch._foreach_addcmul(squares, means, means, value=-1))
    return root_plus_eps(squares, eps=batch.hyper["eps"])


def _rmsprop_obstacles(hyper: Hyper) -> Obstacles:
    # The momentum buffer holds the whole update, decay included: nothing has to be solved for.
    return () if hyper["momentum"] > 0 else coupled_obstacles(hyper)


def _rmsprop_amplification(batch: Batch) -> float:
    if batch.hyper["momentum"] > 0 or batch.hyper["weight_decay"] == 0:
        return 1.0
    return amplification(_rmsprop_roots(batch), pull=batch.lr * batch.hyper["weight_decay"])


def _undo_adagrad(batch: Batch) -> None:
    step_size, decay = _adagrad_step_size(batch), batch.hyper["weight_decay"]
    sums = batch.state["sum"]
    if not batch.has_params:
        roots = root_plus_eps(sums, eps=batch.hyper["eps"])
        undo_divided_update(batch, batch.grads, roots, size=step_size, pull=step_size * decay)
    if not batch.is_first:
        squares = decayed_grads(batch, decay=decay)
        squares = list(torch._foreach_mul(squares, squares))
        torch._foreach_sub_(sums, squares)
        torch._foreach_clamp_min_(sums, 0.0)
        batch.tally.note_cancellation(squares, sums, scale=1.0)


def _adagrad_step_size(batch: Batch) -> float:
    return batch.lr / (1 + (batch.step - 1) * float(batch.hyper["lr_decay"]))


def _adagrad_amplification(batch: Batch) -> float:
    if batch.hyper["weight_decay"] == 0:
        return 1.0
    roots = root_plus_eps(batch.state["sum"], eps=batch.hyper["eps"])
    return amplification(roots, pull=_adagrad_step_size(batch) * batch.hyper["weight_decay"])


def _adagrad_first_state(hyper: Hyper) -> Scalars:
    return {"sum": hyper["initial_accumulator_value"]}


def _undo_adadelta(batch: Batch) -> None:
    """The old accumulator solves a linear equation: with k = g^2 / (v + eps),

    acc' + rho * eps = (acc + eps) * (rho + (1 - rho) * k).
    """
    rho, eps = batch.hyper["rho"], batch.hyper["eps"]
    grads = decayed_grads(batch, decay=batch.hyper["weight_decay"])
    accumulated = batch.state["acc_delta"]
    variances = torch._foreach_add(batch.state["square_avg"], eps)
    divisors = torch._foreach_mul(grads, grads)
    torch._foreach_div_(divisors, variances)
    torch._foreach_mul_(divisors, 1 - rho)
    torch._foreach_add_(divisors, rho)
    torch._foreach_add_(accumulated, rho * eps)
    torch._foreach_div_(accumulated, divisors)
    if not batch.has_params:
        torch._foreach_div_(variances, accumulated)
        torch._foreach_sqrt_(variances)
        torch._foreach_addcdiv_(batch.params, grads, variances, value=batch.lr)
    torch._foreach_sub_(accumulated, eps)
    torch._foreach_clamp_min_(accumulated, 0.0)
    if not batch.is_first:
        undo_square_average(batch.state["square_avg"], grads, beta=rho, batch=batch)


def _adadelta_obstacles(hyper: Hyper) -> Obstacles:
    obstacles: list[Obstacle] = []
    if hyper["weight_decay"] != 0:
        why = "the decay enters the size of the update itself, which then has no closed inverse"
        setting = f"weight_decay={hyper['weight_decay']}"
        obstacles.append(Obstacle(setting=setting, why=why, keep=(PARAM,)))
    if hyper["rho"] == 0:
        why = "nothing of the old accumulator is left after the step"
        obstacles.append(Obstacle(setting="rho=0", why=why, keep=(PARAM, "acc_delta")))
    return tuple(obstacles)


def _undo_muon(batch: Batch) -> None:
    """Runs Newton-Schulz again, on the very numbers the step ran it on."""
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

    momentum, buffers = batch.hyper["momentum"], batch.state["momentum_buffer"]
    for param, grad, buffer in zip(batch.params, batch.grads, buffers, strict=True):
        if batch.has_params:
            break
        direction = grad.lerp(buffer, momentum) if batch.hyper["nesterov"] else buffer
        update = _zeropower_via_newtonschulz(
            direction, batch.hyper["ns_coefficients"], batch.hyper["ns_steps"], batch.hyper["eps"]
        )
        adjusted_lr = _adjust_lr(batch.lr, batch.hyper["adjust_lr_fn"], param.shape)
        param.add_(update, alpha=adjusted_lr)
    if not batch.has_params:
        undo_decoupled_decay(batch)
    if not batch.is_first:
        undo_average(buffers, batch.grads, beta=momentum)


def _muon_amplification(batch: Batch) -> float:
    # torch normalises a bfloat16 buffer in place when no look-ahead made a copy of it: its length
    # is gone after the step.
    is_spoilt = batch.params[0].dtype is torch.bfloat16 and not batch.hyper["nesterov"]
    return math.inf if is_spoilt else 1.0


def _muon_was_first(param: Tensor, state: Mapping[str, Any], hyper: Hyper) -> Tensor:
    assert param.grad is not None
    return _is_noise(state["momentum_buffer"] * hyper["momentum"], beside=param.grad)


def _undo_adafactor(batch: Batch) -> None:
    for row in range(len(batch.params)):
        state = {name: tensors[row] for name, tensors in batch.state.items()}
        if not batch.has_params:
            _undo_adafactor_param(batch.params[row], batch.grads[row], state, batch)
        if not batch.is_first:
            beta = 1 - float(batch.step) ** batch.hyper["beta2_decay"]
            for name, squares in _adafactor_squares(batch.grads[row], state).items():
                undo_average([state[name]], [squares], beta=beta)
                state[name].clamp_min_(0.0)
                batch.tally.note_cancellation([squares], [state[name]], scale=1 / beta - 1)
    if not batch.has_params:
        undo_decoupled_decay(batch)


def _adafactor_squares(grad: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the step added to each running average."""
    if "variance" in state:
        return {"variance": grad * grad}
    means = {}
    for name, dim in (("row_var", -1), ("col_var", -2)):
        norm = torch.linalg.vector_norm(grad, dim=dim, keepdim=True)
        means[name] = norm.square_().div_(grad.size(dim))
    return means


def _undo_adafactor_param(
    param: Tensor, grad: Tensor, state: Mapping[str, Tensor], batch: Batch
) -> None:
    """Adds the update back. Its size followed the root mean square of the old parameter.

    With y the old parameter times q = 1 - lr * decay, U the update at size 1 and n elements, that
    size a solves n q^2 a^2 = |x' + a U|^2: a quadratic equation with one positive root.
    """
    eps1, eps2 = batch.hyper["eps"]
    floor = torch.finfo(param.dtype).eps if eps1 is None else eps1
    if "variance" in state:
        estimate = state["variance"].clone()
    else:
        estimate = state["row_var"] @ state["col_var"]
        estimate.div_(state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=floor))
    update = estimate.clamp_(min=floor * floor).rsqrt_().mul_(grad)
    n = update.numel()
    rms = float(torch.linalg.vector_norm(update)) / math.sqrt(n)
    rho = min(batch.lr, 1 / math.sqrt(batch.step)) / max(1.0, rms / batch.hyper["d"])
    shrink = 1 - batch.lr * batch.hyper["weight_decay"]
    a = n * (shrink**2 - (rho * rms) ** 2)
    b = rho * float((param * update).sum())
    c = float(torch.linalg.vector_norm(param)) ** 2
    size = max(eps2, (b + math.sqrt(b * b + a * c)) / a)
    param.add_(update, alpha=rho * size)


def _adafactor_obstacles(hyper: Hyper) -> Obstacles:
    if hyper["lr"] * (hyper["d"] + hyper["weight_decay"]) < 1:
        return ()
    setting = f"lr={hyper['lr']}, d={hyper['d']} and weight_decay={hyper['weight_decay']}"
    why = "an update may be as large as its parameter, and then its size cannot be solved for"
    return (Obstacle(setting=setting, why=why, keep=(PARAM,)),)


RULES: Mapping[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(
        invert=_undo_sgd,
        tensors=("momentum_buffer",),
        scalars=(),
        was_first=_sgd_was_first,
        notes_cancellation=False,
    ),
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.NAdam: NADAM,
    torch.optim.RAdam: RADAM,
    torch.optim.Adamax: ADAMAX,
    torch.optim.RMSprop: Rule(
        invert=_undo_rmsprop,
        tensors=("square_avg", "momentum_buffer", "grad_avg"),
        obstacles=_rmsprop_obstacles,
        amplification=_rmsprop_amplification,
    ),
    torch.optim.Adagrad: Rule(
        invert=_undo_adagrad,
        tensors=("sum",),
        obstacles=coupled_obstacles,
        amplification=_adagrad_amplification,
        first_state=_adagrad_first_state,
    ),
    torch.optim.Adadelta: Rule(
        invert=_undo_adadelta,
        tensors=("square_avg", "acc_delta"),
        obstacles=_adadelta_obstacles,
    ),
    torch.optim.Muon: Rule(
        invert=_undo_muon,
        tensors=("momentum_buffer",),
        scalars=(),
        amplification=_muon_amplification,
        was_first=_muon_was_first,
        notes_cancellation=False,
        needs_whole_tensors=True,
    ),
    torch.optim.Adafactor: Rule(
        invert=_undo_adafactor,
        tensors=("row_var", "col_var", "variance"),
        obstacles=_adafactor_obstacles,
        needs_whole_tensors=True,
    ),
}
"""By exact class: a subclass may step differently."""
