"""Training on many workers equals a plain PyTorch loop over the same samples."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import equality_job
from equality_job import MODELS, OPTIMIZERS, STEPS, plain
from everstep.testing.reference import Reference
from live import run_live

# The machine's cores are for the workers, whose threads these would fight with.
torch.set_num_threads(1)

SHAPES = [(1, 1), (2, 1), (1, 3), (2, 2), (3, 4)]

RELATIVE = 1e-5


@cache
def reference(
    model: str, optimizer: str, replicas: int, stages: int, clip_norm: float | None = None
) -> Reference:
    return plain(model, optimizer, replicas=replicas, stages=stages, clip_norm=clip_norm)


def check_equal(out: Path, expected: Reference, *, model: str) -> None:
    found = torch.load(out, weights_only=True)
    assert found["losses"] == pytest.approx(expected.losses, rel=RELATIVE)
    rebuilt = MODELS[model][0]()
    rebuilt.load_state_dict(found["weights"])
    for name, parameter in rebuilt.named_parameters():
        difference = (parameter - expected.state_dict[name]).norm()
        assert difference <= RELATIVE * expected.state_dict[name].norm() + 1e-7, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_losses_and_parameters_equal_plain_pytorch(
    tmp_path: Path, shape: tuple[int, int], model: str, optimizer: str
) -> None:
    replicas, stages = shape
    out = tmp_path / "found.pt"
    script = Path(equality_job.__file__)
    live = run_live(
        script,
        *(model, optimizer, "none", out),
        replicas=replicas,
        stages=stages,
        events=tmp_path / "events.jsonl",
    )
    assert live.status == 0, live.output
    check_equal(out, reference(model, optimizer, replicas, stages), model=model)
    assert [event["step"] for event in live.of("step")] == list(range(STEPS))
    assert live.of("finished")


@pytest.mark.parametrize("mode", ["synchronous", "post-validated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_that_triggers_equals_plain_pytorch(
    tmp_path: Path, optimizer: str, mode: str
) -> None:
    """Post-validated, some steps are taken, found too large, undone and taken again."""
    out = tmp_path / "found.pt"
    live = run_live(
        Path(equality_job.__file__),
        *("gpt", optimizer, f"{mode}:0.7", out),
        replicas=2,
        stages=2,
        events=tmp_path / "events.jsonl",
    )
    assert live.status == 0, live.output
    check_equal(out, reference("gpt", optimizer, 2, 2, clip_norm=0.7), model="gpt")
    num_rollbacks = len(live.of("rollback"))
    if mode == "post-validated":
        assert 0 < num_rollbacks < STEPS, "the norm must be too large sometimes, not always"
    else:
        assert num_rollbacks == 0
    assert [event["step"] for event in live.of("step")] == list(range(STEPS))
