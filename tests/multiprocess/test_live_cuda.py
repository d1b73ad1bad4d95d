"""Workers on a CUDA device, live: the same job, the same losses, through the same deaths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from equality_job import plain
from live import TESTS, run_live

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = TESTS / "logged_job.py"
STEPS = 16


@pytest.fixture(autouse=True)
def _on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")


def train(
    folder: Path,
    *options: object,
    shape: tuple[int, int],
    helpers: str = "all",
    flags: Sequence[str] = (),
) -> list[float]:
    """The losses. Checkpoints are taken every 5 steps."""
    folder.mkdir()
    run = run_live(
        SCRIPT,
        *("mlp", folder, STEPS, 5, helpers, folder / "out.pt"),
        *("--device", "cuda", *options),
        replicas=shape[0],
        stages=shape[1],
        events=folder / "events.jsonl",
        flags=flags,
    )
    assert run.status == 0, run.output
    assert run.left_behind == []
    steps = run.of("step")
    assert [event["step"] for event in steps] == list(range(STEPS))
    losses: list[float] = [event["loss"] for event in steps]
    return losses


def on_the_processor(*, shape: tuple[int, int]) -> list[float]:
    torch.set_num_threads(1)
    return plain("mlp", "adamw", replicas=shape[0], stages=shape[1], steps=STEPS).losses


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_worker_is_killed_and_replaced(tmp_path: Path, backend: str) -> None:
    shape, options = (2, 2), ("--backend", backend, "--evaluate-after", 3)
    undisturbed = train(tmp_path / "whole", *options, shape=shape)
    assert undisturbed == pytest.approx(on_the_processor(shape=shape), rel=1e-3)
    flags = ("--kill", "1:1@6", "--replace-after", "0.1")
    killed = train(tmp_path / "killed", *options, shape=shape, flags=flags)
    assert killed == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("clip", ["synchronous:0.5", "post-validated:0.5"])
def test_clipping_is_agreed_on(tmp_path: Path, clip: str) -> None:
    undisturbed = train(tmp_path / "whole", "--clip", clip, shape=(2, 2))
    killed = train(tmp_path / "killed", "--clip", clip, shape=(2, 2), flags=("--kill", "0:0@7"))
    assert killed == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize(("helpers", "backend"), [("0", "gloo"), ("all", "gloo"), ("all", "nccl")])
def test_a_stage_without_a_worker_is_rebuilt(tmp_path: Path, helpers: str, backend: str) -> None:
    shape, options = (1, 3), ("--backend", backend)
    undisturbed = train(tmp_path / "whole", *options, shape=shape)
    rebuilt = train(tmp_path / "rebuilt", *options, "--die", "0:1@13", shape=shape, helpers=helpers)
    assert rebuilt == pytest.approx(undisturbed, rel=1e-5)
