"""For any optimizer with an inverse and any settings: step, undo, and nothing has happened."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everstep.recovery.undo import remember, undo

PROFILE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

NUM_REDONE = 20


def _choices(**options: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in options.items()}
    )


FLAGS: dict[str, list[Any]] = {"maximize": [False, True], "foreach": [None, False, True]}
BETAS: list[Any] = [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.95)]
DECAY: list[Any] = [0.0, 0.01, 0.1]


def _is_valid_sgd(options: dict[str, Any]) -> bool:
    return not options["nesterov"] or (options["momentum"] > 0 and options["dampening"] == 0)


def _with(
    optimizer: type[torch.optim.Optimizer], options: st.SearchStrategy[dict[str, Any]]
) -> st.SearchStrategy[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    return st.tuples(st.just(optimizer), options)


SETUPS = st.one_of(
    _with(
        torch.optim.SGD,
        _choices(
            lr=[0.1, 0.01],
            momentum=[0.0, 0.9, 0.5],
            dampening=[0.0, 0.3],
            nesterov=[False, True],
            weight_decay=DECAY,
            **FLAGS,
        ).filter(_is_valid_sgd),
    ),
    _with(torch.optim.SGD, _choices(lr=[0.1], momentum=[0.0, 0.9], fused=[True])),
    _with(torch.optim.Adam, _choices(betas=BETAS, weight_decay=DECAY, **FLAGS)),
    _with(torch.optim.AdamW, _choices(betas=BETAS, weight_decay=DECAY, **FLAGS)),
    _with(torch.optim.AdamW, _choices(betas=BETAS, weight_decay=DECAY, fused=[True])),
    _with(
        torch.optim.NAdam,
        _choices(betas=BETAS, weight_decay=DECAY, decoupled_weight_decay=[True], **FLAGS),
    ),
    _with(torch.optim.NAdam, _choices(betas=BETAS, momentum_decay=[4e-3, 0.1], **FLAGS)),
    _with(
        torch.optim.RAdam,
        _choices(betas=BETAS, weight_decay=DECAY, decoupled_weight_decay=[False, True], **FLAGS),
    ),
    _with(
        torch.optim.RMSprop,
        _choices(lr=[1e-3], alpha=[0.99, 0.9], centered=[False, True], **FLAGS),
    ),
    _with(
        torch.optim.RMSprop,
        _choices(lr=[1e-3], momentum=[0.9], weight_decay=DECAY, centered=[False, True], **FLAGS),
    ),
    _with(
        torch.optim.Adagrad,
        _choices(lr_decay=[0.0, 0.1], initial_accumulator_value=[0.0, 0.1], **FLAGS),
    ),
    _with(torch.optim.Adadelta, _choices(lr=[1.0, 0.1], rho=[0.9, 0.5], **FLAGS)),
    _with(
        torch.optim.Muon,
        _choices(
            momentum=[0.95, 0.5],
            nesterov=[True, False],
            weight_decay=DECAY,
            adjust_lr_fn=["original", "match_rms_adamw"],
        ),
    ),
    _with(torch.optim.Adafactor, _choices(lr=[0.01, 0.1], weight_decay=DECAY, **FLAGS)),
)


class Training:
    """A small regression that steps on the same data at the same step, however often it runs."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        bias = optimizer is not torch.optim.Muon
        self.model = nn.Sequential(
            nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 2, bias=bias)
        )
        self.optimizer = optimizer(self.model.parameters(), **options)

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 6, generator=generator)
        # Small enough for sign flips of a maximized loss not to blow up within the test.
        return 0.1 * nn.functional.mse_loss(self.model(inputs), inputs[:, :2].sin())

    def step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def params(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


@PROFILE
@given(setup=SETUPS, num_before=st.integers(0, 6), has_record=st.booleans())
def test_a_step_taken_back_leaves_no_trace(
    setup: tuple[type[torch.optim.Optimizer], dict[str, Any]], num_before: int, has_record: bool
) -> None:
    training, undisturbed = Training(*setup), Training(*setup)
    for step in range(num_before):
        assert training.step(step) == undisturbed.step(step)
    params, state = training.params(), copy.deepcopy(training.optimizer.state_dict())
    record = remember(training.optimizer) if has_record else None
    training.step(num_before)
    undo(training.optimizer, record=record)

    for now, before in zip(training.params(), params, strict=True):
        torch.testing.assert_close(now, before, rtol=1e-6, atol=1e-6 * float(before.abs().max()))
    _assert_state_close(training.optimizer.state_dict(), state)

    for step in range(num_before, num_before + NUM_REDONE):
        expected = undisturbed.step(step)
        assert abs(training.step(step) - expected) <= 1e-5 * abs(expected)


def _assert_state_close(now: dict[str, Any], before: dict[str, Any]) -> None:
    assert now["param_groups"] == before["param_groups"]
    assert now["state"].keys() == before["state"].keys()
    for key, entries in before["state"].items():
        assert now["state"][key].keys() == entries.keys()
        for name, value in entries.items():
            if name == "step":
                assert now["state"][key][name].item() == value.item()
            else:
                scale = float(value.abs().max())
                if scale > 0 and not _is_never_read_again(name, before, value):
                    torch.testing.assert_close(
                        now["state"][key][name], value, rtol=1e-3, atol=1e-5 * scale
                    )


def _is_never_read_again(name: str, state: dict[str, Any], value: Tensor) -> bool:
    """With beta1 = 0 the first moment and NAdam's product are overwritten unread by each step."""
    betas = state["param_groups"][0].get("betas", (1.0, 1.0))
    return betas[0] == 0 and (name == "exp_avg" or value.numel() == 1)
