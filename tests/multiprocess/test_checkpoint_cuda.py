"""Checkpoints of states on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.checkpoint.arena import Arena
from everstep.checkpoint.baselines import EverySteps
from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.restore import load_newest
from everstep.checkpoint.state import FlatState

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAIT_S = 30.0
NUM_ELEMENTS = 16 << 20
BUSY_CYCLES = 200_000_000
"""About 0.1 s: what the compute stream still has to do when the save is called."""


def saved(engine: Engine, directory: Path) -> dict[str, torch.Tensor]:
    engine.wait(WAIT_S)
    (event,) = engine.poll()
    assert event["event"] == "checkpoint", event
    loaded = load_newest(directory)
    assert loaded is not None
    return dict(loaded[1].tensors)


@pytest.mark.parametrize(
    "slot_bytes", [None, 20 << 20], ids=["in one wave", "in waves, of slots that are too small"]
)
def test_a_save_holds_the_value_between_the_update_before_and_the_one_after(
    tmp_path: Path, slot_bytes: int | None
) -> None:
    """Both are only queued when they are asked for: neither may be overtaken by the copy."""
    weights = torch.zeros(NUM_ELEMENTS, device="cuda")
    settings = EngineSettings(max_slot_bytes=slot_bytes, probe_bytes=0)
    with Engine(tmp_path, settings=settings) as engine:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        weights.fill_(1.0)
        assert engine.save(1, FlatState(tensors={"weights": weights}))
        engine.before_update()
        weights.fill_(2.0)
        tensors = saved(engine, tmp_path)
    assert tensors["weights"].unique().tolist() == [1.0]  # type: ignore[no-untyped-call]
    assert weights.unique().tolist() == [2.0]  # type: ignore[no-untyped-call]


def test_what_a_forward_pass_changes_is_saved_as_it_was(tmp_path: Path) -> None:
    """And what lies across memory, and what is on the processor beside it."""
    running = torch.zeros(NUM_ELEMENTS, device="cuda")
    across = torch.arange(6.0, device="cuda").reshape(2, 3).t()
    count = torch.tensor(7)
    state = {"running": running, "across": across, "count": count}
    with Engine(tmp_path, settings=EngineSettings(probe_bytes=0)) as engine:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        running.fill_(1.0)
        assert engine.save(1, FlatState(tensors=state, volatile=frozenset({"running"})))
        running.fill_(2.0)
        tensors = saved(engine, tmp_path)
    assert tensors["running"].unique().tolist() == [1.0]  # type: ignore[no-untyped-call]
    assert torch.equal(tensors["across"], across.cpu())
    assert tensors["count"].item() == 7


def test_a_slot_that_was_prepared_for_a_device_is_page_locked_and_used(tmp_path: Path) -> None:
    arena = Arena(num_slots=1, max_slot_bytes=1 << 20)
    slot = arena.memory(0, wanted_bytes=8192, device=torch.device("cuda"))
    assert slot.memory.is_pinned()
    assert arena.memory(0, wanted_bytes=8192, device=torch.device("cuda")) is slot
    arena.close()
    weights = torch.randn(1000, device="cuda")
    with Engine(tmp_path, settings=EngineSettings(probe_bytes=0)) as engine:
        engine.prepare(FlatState(tensors={"weights": weights}))
        assert engine.save(1, FlatState(tensors={"weights": weights}))
        assert torch.equal(saved(engine, tmp_path)["weights"], weights.cpu())


def test_a_state_is_read_into_tensors_on_the_device(tmp_path: Path) -> None:
    state = {"large": torch.randn(NUM_ELEMENTS, device="cuda"), "few": torch.ones(3).cuda()}
    with Engine(tmp_path, settings=EngineSettings(probe_bytes=0)) as engine:
        assert engine.save(1, FlatState(tensors=state))
        engine.wait(WAIT_S)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    assert load_newest(tmp_path, into=into) is not None
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name


def train(directory: Path, *, total: int, leaves_after: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 1))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = [torch.randn(16, 8) for _ in range(5)]
    saver = everstep.Autosave(
        model=model, optimizer=optimizer, directory=directory, policy=EverySteps(4)
    )
    for step, batch in saver.steps(loader, total=total):
        loss = model(batch.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saver.report(loss)
        if step == leaves_after:
            break
    return model.state_dict()


def test_a_loop_on_the_device_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, which draws from the device's generator."""
    whole = train(tmp_path / "whole", total=20)
    train(tmp_path / "cut", total=20, leaves_after=11)
    again = train(tmp_path / "cut", total=20)
    for name, tensor in whole.items():
        assert torch.equal(again[name], tensor), name
