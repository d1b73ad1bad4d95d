"""What an undo rule is, and the inverses that several optimizers share.

Knows no optimizer by name. Every function here turns the values after a step into those before it,
in place, and writes nothing but the tensors it was given for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from everstep.recovery.undo_batches import Batch, Hyper
from everstep.recovery.undo_tally import Tensors

Scalars: TypeAlias = Mapping[str, float]

PARAM = "param"
"""Stands for the parameter itself in a list of tensors to keep."""

# Beyond this the rounding of the step comes back more than sixteenfold: about 1e-6 in fp32.
AMPLIFICATION_LIMIT = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A setting under which the rule alone cannot take the step back, or not always."""

    setting: str
    why: str
    keep: tuple[str, ...]
    """The tensors that, copied before the step, remove the obstacle."""
    is_certain: bool = True
    """False when most steps can be taken back; undo then looks at the numbers before it starts."""

    @property
    def sentence(self) -> str:
        return f"with {self.setting}, {self.why}"


Obstacles: TypeAlias = tuple[Obstacle, ...]


def decay_obstacles(hyper: Hyper) -> Obstacles:
    """Multiplying by nearly zero cannot be taken back."""
    shrink = 1 - hyper["lr"] * hyper["weight_decay"]
    if abs(shrink) * AMPLIFICATION_LIMIT >= 1:
        return ()
    why = f"the step multiplies the parameters by {shrink:.3g}, which leaves too little of them"
    setting = f"lr={hyper['lr']} and weight_decay={hyper['weight_decay']}"
    return (Obstacle(setting=setting, why=why, keep=(PARAM,)),)


def count_down(hyper: Hyper, scalars: Scalars) -> Scalars:  # noqa: ARG001 - some rules read it
    return {"step": scalars["step"] - 1} if "step" in scalars else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the step of one kind of optimizer is taken back."""

    invert: Callable[[Batch], None]
    tensors: tuple[str, ...]
    """State entries shaped like the parameter, or read whole; those that are absent are skipped."""
    scalars: tuple[str, ...] = ("step",)
    """State entries of one number that `invert` reads."""
    obstacles: Callable[[Hyper], Obstacles] = decay_obstacles
    """What stands in the way under these hyper-parameters."""
    previous: Callable[[Hyper, Scalars], Scalars] = count_down
    """The scalars as they were before the step."""
    amplification: Callable[[Batch], float] | None = None
    """How much rounding would grow, measured before anything is changed."""
    was_first: Callable[[Tensor, Mapping[str, Any], Hyper], Tensor] | None = None
    """For state without a step counter: whether what came back is the state before any step.

    A tensor of one boolean, so that nobody waits for a device in the middle."""
    first_state: Callable[[Hyper], Scalars] | None = None
    """For state that exists before the first step: what its tensors are filled with."""
    notes_cancellation: bool = True
    """Whether `invert` looks at the numbers, and so sees NaN by itself after the first step."""
    needs_whole_tensors: bool = False


def coupled_decay(hyper: Hyper) -> float:
    """The weight decay that is added to the gradient, if that is how this group decays."""
    return 0.0 if hyper.get("decoupled_weight_decay") else float(hyper["weight_decay"])


def undo_decoupled_decay(batch: Batch, *, lr: float | None = None) -> None:
    shrink = 1 - (batch.lr if lr is None else lr) * batch.hyper["weight_decay"]
    if shrink != 1:
        torch._foreach_div_(batch.params, shrink)


def decayed_grads(batch: Batch, *, decay: float) -> list[Tensor]:
    """The gradients with the decay of the parameters, which must be back already."""
    if decay == 0:
        return batch.grads
    return list(torch._foreach_add(batch.grads, batch.params, alpha=decay))


def undo_average(averages: list[Tensor], values: list[Tensor], *, beta: float) -> None:
    """Takes `average = beta * average + (1 - beta) * value` back.

    With beta = 0 the old average is gone, and never read again: it may stay as it is.
    """
    if beta != 0:
        torch._foreach_lerp_(averages, values, 1 - 1 / beta)


def undo_square_average(
    averages: list[Tensor], grads: list[Tensor], *, beta: float, batch: Batch
) -> None:
    """Takes a running average of squares back, never below zero, and notes the cancellation.

    Gradients other than the batch's own are overwritten: memory that is in use already is faster.
    """
    if beta == 0:
        return
    if grads is batch.grads:
        grads = list(torch._foreach_mul(grads, grads))
    else:
        torch._foreach_mul_(grads, grads)
    squares = grads
    torch._foreach_lerp_(averages, squares, 1 - 1 / beta)
    torch._foreach_clamp_min_(averages, 0.0)
    batch.tally.note_cancellation(squares, averages, scale=1 / beta - 1)


def root_plus_eps(squares: Tensors, *, eps: float) -> list[Tensor]:
    roots = torch._foreach_sqrt(squares)
    torch._foreach_add_(roots, eps)
    return list(roots)


def undo_divided_update(
    batch: Batch, numerators: Tensors, denominators: Tensors, *, size: float, pull: float
) -> None:
    """Solves `x' = x - (size * numerator + pull * x) / denominator` for x, in place.

    `pull` is there when weight decay was added to the gradient before the division.
    """
    if pull == 0:
        torch._foreach_addcdiv_(batch.params, numerators, denominators, value=size)
        return
    torch._foreach_mul_(batch.params, denominators)
    torch._foreach_add_(batch.params, numerators, alpha=size)
    torch._foreach_div_(batch.params, torch._foreach_sub(denominators, pull))


def amplification(denominators: list[Tensor], *, pull: float) -> float:
    """How much `undo_divided_update` magnifies rounding at worst."""
    ratios = torch._foreach_div(denominators, torch._foreach_sub(denominators, pull))
    worst = float(torch.stack(torch._foreach_norm(ratios, math.inf)).max())
    return math.inf if math.isnan(worst) else worst


def coupled_obstacles(hyper: Hyper) -> Obstacles:
    """Decay that is divided along with the gradient can move two values onto the same one."""
    if coupled_decay(hyper) == 0:
        return decay_obstacles(hyper)
    why = (
        "the decay is divided by the running root of the gradients, so a parameter with very"
        " small gradients may not be recoverable"
    )
    setting = f"weight_decay={hyper['weight_decay']}"
    return (Obstacle(setting=setting, why=why, keep=(PARAM,), is_certain=False),)
