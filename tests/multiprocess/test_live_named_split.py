"""A model cut by names trains as the whole of it does in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import named_split_job
from everstep.execute.data import fetch
from everstep.testing.reference import plain_training
from live import run_live
from named_split_job import BATCH_SIZE, MICROBATCHES, STEPS, Reader, Sentences

torch.set_num_threads(1)

RELATIVE = 1e-5


@pytest.mark.parametrize("replicas", [1, 2], ids="{0}x2".format)
def test_a_model_cut_by_names_equals_plain_pytorch(tmp_path: Path, replicas: int) -> None:
    """Without dropout, so that the reference can be the model itself, never cut or traced."""
    out = tmp_path / "found.pt"
    live = run_live(
        Path(named_split_job.__file__),
        out,
        replicas=replicas,
        stages=2,
        events=tmp_path / "events.jsonl",
    )
    assert live.status == 0, live.output
    found = torch.load(out, weights_only=True)
    expected = plain_training(
        Reader,
        nn.functional.cross_entropy,
        named_split_job.optimizer,
        Sentences(),
        batch_size=BATCH_SIZE,
        replicas=replicas,
        microbatches=MICROBATCHES,
        steps=STEPS,
    )
    assert found["losses"] == pytest.approx(expected.losses, rel=RELATIVE)
    plain = Reader()
    plain.load_state_dict(found["weights"])
    for name, value in expected.state_dict.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=RELATIVE, atol=1e-6)
    inputs, targets = fetch(Sentences(), range(64))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(plain.eval()(**inputs), targets)
    assert found["evaluation"] == pytest.approx({"loss": loss.item()}, rel=RELATIVE)
