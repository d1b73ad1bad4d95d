"""Two of three workers of a stage are killed and not replaced: one of the other stage moves.

Whether a second one follows is a matter of the measured durations: with stage 1 the slower one it
pays, and on a busy machine it often is. So the first move is what is looked at.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from equality_job import BATCH_SIZE, MICROBATCHES, MODELS, OPTIMIZERS, STEPS
from everstep.testing.reference import plain_training
from live import TESTS, Live, of, read_events

pytestmark = pytest.mark.timeout(120)

CHEAPLY = (
    "import everstep.training.coordinating as c; c.MOVE_S = 1e-6;"
    " from everstep.cli.main import main; main()"
)
"""These steps are so short that no move would pay otherwise."""


def test_a_live_worker_moves_and_the_losses_stay_the_same(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    events = tmp_path / "events.jsonl"
    flags = ["--replace-after", "never", "--kill", "0:1@9", "--kill", "1:1@9"]
    shape = ["--replicas", "3", "--stages", "2", "--events", str(events)]
    script = [str(TESTS / "equality_job.py"), "mlp", "adamw", "none", str(tmp_path / "out.pt")]
    with Live([sys.executable, "-c", CHEAPLY, "run", *shape, *flags, *script]) as live:
        status, output = live.wait()
        assert status == 0, output
        assert live.left_behind() == []
    found = read_events(events)
    first = of(found, "moving")[0]
    assert (first["stage"], first["to"][-1]) == (0, "1")
    after = [event for event in of(found, "generation") if event["time"] > first["time"]]
    assert any(len(event["lost"]) == 2 and first["to"] not in event["lost"] for event in after)
    assert [event["step"] for event in of(found, "step")] == list(range(STEPS))
    build, loss, dataset = MODELS["mlp"]
    expected = plain_training(
        build,
        loss,
        OPTIMIZERS["adamw"],
        dataset,
        batch_size=BATCH_SIZE,
        replicas=3,
        microbatches=MICROBATCHES,
        num_stages=2,
        steps=STEPS,
        seed=5,
        scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, step_size=10, gamma=0.5),
    ).losses
    assert [event["loss"] for event in of(found, "step")] == pytest.approx(expected, rel=1e-5)
