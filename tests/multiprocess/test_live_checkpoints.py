"""Jobs with checkpoints: killed whole and started again, a whole stage killed, another layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equality_job import STEPS
from live import TESTS, Live, LiveRun, command, environment, read_events, run_live

pytestmark = pytest.mark.timeout(150)

SCRIPT = TESTS / "saved_job.py"
MODEL = "gpt"
"""With dropout, whose randomness is keyed by stage and replica."""


def train(
    folder: Path,
    *,
    replicas: int,
    stages: int,
    model: str = MODEL,
    directory: str = "ckpt",
    steps: int = STEPS,
    flags: tuple[str, ...] = (),
) -> tuple[LiveRun, dict[str, Any]]:
    run = run_live(
        SCRIPT,
        *(model, folder / directory, steps, 5, 0.02, folder / "out.pt"),
        replicas=replicas,
        stages=stages,
        events=folder / f"{directory}-{replicas}x{stages}.jsonl",
        flags=flags,
    )
    assert run.status == 0, run.output
    return run, torch.load(folder / "out.pt")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LiveRun, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("undisturbed"), replicas=2, stages=2)


def test_a_job_that_was_killed_goes_on_bit_for_bit(
    tmp_path: Path, undisturbed: tuple[LiveRun, dict[str, Any]]
) -> None:
    events = tmp_path / "killed.jsonl"
    arguments = (MODEL, tmp_path / "ckpt", STEPS, 5, 0.05, tmp_path / "never.pt")
    shape = ("--replicas", 2, "--stages", 2, "--events", events)
    with Live(command("run", *shape, SCRIPT, *arguments)) as live:
        live.wait_events(events, "checkpoint", 1)
        live.kill_all()
    run, resumed = train(tmp_path, replicas=2, stages=2)
    (restored,) = run.of("restored")
    first = restored["step"] + 1
    assert 0 < first < STEPS
    assert resumed["indices"] == list(range(first, STEPS))
    expected = undisturbed[1]["weights"]
    assert resumed["weights"].keys() == expected.keys()
    for name, weights in expected.items():
        assert torch.equal(resumed["weights"][name], weights), name


def test_a_stage_that_is_lost_whole_costs_no_step(
    tmp_path: Path, undisturbed: tuple[LiveRun, dict[str, Any]]
) -> None:
    flags = ("--kill", f"0:1@{STEPS - 8}", "--kill", f"1:1@{STEPS - 8}")
    run, _ = train(tmp_path, replicas=2, stages=2, flags=flags)
    (restarting,) = run.of("restarting")
    assert restarting["stage"] == 1
    assert [event["step"] for event in run.of("step")] == list(range(STEPS))
    losses = [event["loss"] for event in run.of("step")]
    assert losses == pytest.approx([e["loss"] for e in undisturbed[0].of("step")], rel=1e-5)
    assert run.of("generation")[-1]["rungs"] == {"0": "checkpoint", "1": "checkpoint"}
    assert run.left_behind == []


def test_a_checkpoint_of_two_stages_is_loaded_by_three(tmp_path: Path) -> None:
    """Without dropout, which another layout draws differently."""
    undisturbed, _ = train(tmp_path, model="mlp", replicas=1, stages=3, directory="undisturbed")
    train(tmp_path, model="mlp", replicas=2, stages=2, steps=18)
    run, found = train(tmp_path, model="mlp", replicas=1, stages=3)
    assert run.of("restored")[0]["step"] == 17
    assert found["indices"] == list(range(18, STEPS))
    losses = [event["loss"] for event in undisturbed.of("step")]
    assert [e["loss"] for e in run.of("step")] == pytest.approx(losses[18:], rel=1e-5)


def test_what_was_saved_by_many_goes_on_alone_with_the_same_state(tmp_path: Path) -> None:
    """Nothing is trained after loading: the weights are those that were saved, bit for bit."""
    _, saved = train(tmp_path, replicas=2, stages=2, steps=12)
    arguments = (MODEL, tmp_path / "ckpt", 12, 5, 0, tmp_path / "alone.pt")
    subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], check=True, env=environment(), timeout=100
    )
    alone = torch.load(tmp_path / "alone.pt")
    assert alone["indices"] == []
    for name, weights in saved["weights"].items():
        assert torch.equal(alone["weights"][name], weights), name


def test_a_flipped_bit_makes_all_begin_with_the_checkpoint_before(tmp_path: Path) -> None:
    train(tmp_path, replicas=1, stages=2, steps=12)
    newest = sorted((tmp_path / "ckpt").glob("step-*"))[-1]
    shard = next(newest.glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    run, _ = train(tmp_path, replicas=1, stages=2, steps=14)
    assert run.of("restored")[0]["step"] < 11
    assert read_events(tmp_path / "ckpt-1x2.jsonl")[-1]["event"] in ("finished", "checkpoint")
