"""The inverse of Adam's step and of its relatives': NAdam, RAdam, Adamax and LAMB.

Knows nothing of records, copies or which tensors belong together. In every rule the batch holds the
values after the step, and nothing but the batch's own tensors is written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from everstep.recovery.undo_batches import Batch, Hyper
from everstep.recovery.undo_rule import (
    Obstacle,
    Obstacles,
    Rule,
    Scalars,
    amplification,
    coupled_decay,
    coupled_obstacles,
    decay_obstacles,
    decayed_grads,
    root_plus_eps,
    undo_average,
    undo_decoupled_decay,
    undo_divided_update,
    undo_square_average,
)


def _undo_adam(batch: Batch) -> None:
    if not batch.has_params:
        squares = "max_exp_avg_sq" if batch.hyper.get("amsgrad") else "exp_avg_sq"
        _add_normalised_mean(batch, squares=squares, lr=batch.lr)
        if batch.hyper.get("decoupled_weight_decay"):
            undo_decoupled_decay(batch)
    _undo_moments(batch)


def _add_normalised_mean(batch: Batch, *, squares: str, lr: float) -> None:
    """Adds `lr * m^ / (sqrt(v^) + eps)`, both corrected for their bias, to the parameters."""
    beta1, beta2 = batch.hyper["betas"]
    # Root and eps are both left multiplied with the correction: one pass less over the tensors.
    correction = math.sqrt(1 - beta2**batch.step)
    roots = root_plus_eps(batch.state[squares], eps=batch.hyper["eps"] * correction)
    size = lr * correction / (1 - beta1**batch.step)
    torch._foreach_addcdiv_(batch.params, batch.state["exp_avg"], roots, value=size)


def _undo_moments(batch: Batch, *, decay: float | None = None) -> None:
    if batch.is_first:
        return
    beta1, beta2 = batch.hyper["betas"]
    grads = decayed_grads(batch, decay=coupled_decay(batch.hyper) if decay is None else decay)
    undo_average(batch.state["exp_avg"], grads, beta=beta1)
    undo_square_average(batch.state["exp_avg_sq"], grads, beta=beta2, batch=batch)


def _adam_obstacles(hyper: Hyper) -> Obstacles:
    if not hyper.get("amsgrad"):
        return decay_obstacles(hyper)
    why = "the running maximum of the second moments forgets what it replaced"
    forgets = Obstacle(setting="amsgrad=True", why=why, keep=("max_exp_avg_sq",))
    return (forgets, *decay_obstacles(hyper))


def _undo_radam(batch: Batch) -> None:
    beta1, beta2 = batch.hyper["betas"]
    correction2 = 1 - beta2**batch.step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * batch.step * beta2**batch.step / correction2
    step_size = batch.lr / (1 - beta1**batch.step)
    if batch.has_params:
        pass
    elif length > 5.0:
        rect = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        roots = root_plus_eps(batch.state["exp_avg_sq"], eps=batch.hyper["eps"])
        value = step_size * math.sqrt(rect * correction2)
        torch._foreach_addcdiv_(batch.params, batch.state["exp_avg"], roots, value=value)
    else:
        torch._foreach_add_(batch.params, batch.state["exp_avg"], alpha=step_size)
    if not batch.has_params and batch.hyper["decoupled_weight_decay"]:
        undo_decoupled_decay(batch)
    _undo_moments(batch)


def _undo_nadam(batch: Batch) -> None:
    if not batch.has_params:
        roots, (by_grad, by_mean) = _nadam_roots(batch), _nadam_step_sizes(batch)
        torch._foreach_addcdiv_(batch.params, batch.state["exp_avg"], roots, value=by_mean)
        pull = by_grad * coupled_decay(batch.hyper)
        undo_divided_update(batch, batch.grads, roots, size=by_grad, pull=pull)
        if batch.hyper["decoupled_weight_decay"]:
            undo_decoupled_decay(batch)
    _undo_moments(batch)


def _nadam_roots(batch: Batch) -> list[Tensor]:
    """The denominators times the root of the bias correction, as in `_nadam_step_sizes`."""
    eps = batch.hyper["eps"] * _nadam_correction(batch)
    return root_plus_eps(batch.state["exp_avg_sq"], eps=eps)


def _nadam_correction(batch: Batch) -> float:
    return math.sqrt(1 - batch.hyper["betas"][1] ** batch.step)


def _nadam_mu(hyper: Hyper, step: int) -> float:
    mu: float = hyper["betas"][0] * (1 - 0.5 * 0.96 ** (step * hyper["momentum_decay"]))
    return mu


def _nadam_step_sizes(batch: Batch) -> tuple[float, float]:
    """What the gradient and the first moment were multiplied with, for `_nadam_roots`."""
    product, lr = batch.scalars["mu_product"], batch.lr * _nadam_correction(batch)
    mu, next_mu = (_nadam_mu(batch.hyper, batch.step + later) for later in (0, 1))
    return lr * (1 - mu) / (1 - product), lr * next_mu / (1 - product * next_mu)


def _nadam_previous(hyper: Hyper, scalars: Scalars) -> Scalars:
    mu = _nadam_mu(hyper, round(scalars["step"]))
    product = scalars["mu_product"]
    # With beta1 = 0 every product after the first is zero, whatever it was before.
    return {"step": scalars["step"] - 1, "mu_product": product / mu if mu else product}


def _nadam_amplification(batch: Batch) -> float:
    if coupled_decay(batch.hyper) == 0:
        return 1.0
    pull = _nadam_step_sizes(batch)[0] * coupled_decay(batch.hyper)
    return amplification(_nadam_roots(batch), pull=pull)


def _undo_adamax(batch: Batch) -> None:
    beta1, _ = batch.hyper["betas"]
    if not batch.has_params:
        step_size = batch.lr / (1 - beta1**batch.step)
        torch._foreach_addcdiv_(
            batch.params, batch.state["exp_avg"], batch.state["exp_inf"], value=step_size
        )
    if not batch.is_first:
        grads = decayed_grads(batch, decay=batch.hyper["weight_decay"])
        undo_average(batch.state["exp_avg"], grads, beta=beta1)


def _adamax_obstacles(hyper: Hyper) -> Obstacles:
    why = "the running maximum of the gradients forgets what it replaced"
    return (Obstacle(setting=f"betas={hyper['betas']}", why=why, keep=("exp_inf",)),)


def _undo_lamb(batch: Batch) -> None:
    if not batch.has_params:
        lr = batch.lr * batch.scalars["trust_ratio"]
        _add_normalised_mean(batch, squares="exp_avg_sq", lr=lr)
        undo_decoupled_decay(batch, lr=lr)
    _undo_moments(batch, decay=0.0)


def _lamb_amplification(batch: Batch) -> float:
    shrink = 1 - batch.lr * batch.scalars["trust_ratio"] * batch.hyper["weight_decay"]
    return 1 / abs(shrink) if shrink else math.inf


_MOMENTS = ("exp_avg", "exp_avg_sq")

ADAM = Rule(invert=_undo_adam, tensors=(*_MOMENTS, "max_exp_avg_sq"), obstacles=_adam_obstacles)
RADAM = Rule(invert=_undo_radam, tensors=_MOMENTS)
NADAM = Rule(
    invert=_undo_nadam,
    tensors=_MOMENTS,
    scalars=("step", "mu_product"),
    obstacles=coupled_obstacles,
    previous=_nadam_previous,
    amplification=_nadam_amplification,
)
ADAMAX = Rule(
    invert=_undo_adamax,
    tensors=("exp_avg", "exp_inf"),
    obstacles=_adamax_obstacles,
    notes_cancellation=False,
)
LAMB = Rule(
    invert=_undo_lamb,
    tensors=_MOMENTS,
    scalars=("step", "trust_ratio"),
    amplification=_lamb_amplification,
)
"""For optimizers with `x -= lr * q * (m^ / (sqrt(v^) + eps) + weight_decay * x)`, bias-corrected,
that leave q of the last step in `state["trust_ratio"]`."""
