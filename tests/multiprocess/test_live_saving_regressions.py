"""Bugs of checkpoints in everstep's own jobs, with their real writers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import everstep
from everstep.checkpoint.engine import EngineSettings
from everstep.checkpoint.policy import Policy, Situation
from everstep.checkpoint.run_record import RunRecord
from everstep.execute.split import StageModule
from everstep.training.run import Run
from everstep.training.saving import StageSaver
from everstep.training.stage_tree import StageTree
from live import TESTS, run_live

STEPS = 40


class Numbers:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), index / 12), torch.tensor([1.0])


@dataclass(slots=True)
class Watching:
    """Saves every tenth step and notes what it was shown."""

    seen: list[Situation] = field(default_factory=list)

    def is_due(self, situation: Situation) -> bool:
        self.seen.append(situation)
        return situation.step % 10 == 0


def begin(directory: str | Path, *, steps: int, policy: Policy) -> Run:
    settings = EngineSettings(probe_bytes=0)
    job = everstep.Job(
        model=lambda: torch.nn.Linear(3, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.05),
        dataset=Numbers(),
        batch_size=4,
        microbatches=2,
        checkpoint=everstep.Checkpoints(directory=directory, policy=policy, engine=settings),
    )
    return everstep.train(job, steps=steps)


def train(directory: str | Path, *, steps: int) -> tuple[list[int], list[Situation]]:
    policy = Watching()
    run = begin(directory, steps=steps, policy=policy)
    indices = [step.index for step in run]
    run.close()
    return indices, policy.seen


def test_a_job_that_was_restored_counts_from_its_checkpoint_on(tmp_path: Path) -> None:
    """The policy was told that all steps of the job, and no second of it, lay behind the last
    checkpoint: it saved at once, and priced a loss at the whole job."""
    _, before = train(tmp_path, steps=STEPS)
    indices, after = train(tmp_path, steps=STEPS + 5)
    assert indices == list(range(STEPS, STEPS + 5))
    assert [each.steps_since for each in after] == [1, 2, 3, 4, 5]
    assert after[0].seconds > before[-1].seconds
    assert after[0].num_taken >= before[-1].num_taken
    assert after[0].costs.restore_s > 0


def test_the_losses_before_a_restore_are_not_forgotten(tmp_path: Path) -> None:
    """Only plain loops kept them: a live job that was restored late had no curve for long."""
    _, before = train(tmp_path, steps=STEPS)
    assert before[-1].curve is not None
    _, after = train(tmp_path, steps=STEPS + 2)
    assert after[0].curve is not None


def test_checkpoints_at_a_url_are_found_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The URL was taken for a path: the job saved into a directory `file:` of where it was
    started, on each machine its own."""
    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setenv("TMPDIR", str(staging))
    monkeypatch.setattr(tempfile, "tempdir", str(staging))
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path / 'store'}"
    train(url, steps=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["staging", "store"]
    assert (tmp_path / "store" / "step-000000011" / "manifest.json").exists()
    indices, _ = train(url, steps=14)
    assert indices == [12, 13]


def test_the_memory_for_copies_is_there_before_the_first_of_them(tmp_path: Path) -> None:
    """It was made inside the first save, whose cost was then taken for that of all others."""
    run = begin(tmp_path, steps=12, policy=Watching())
    next(run)
    assert run._saves is not None
    engine = run._saves._saver._started_engine()
    assert engine._wait_made(30.0), "it is made on a thread, from the first step on"
    arena = engine._arena
    slot = arena._slots[0]
    assert [step.index for step in run] == list(range(1, 12))
    assert arena._slots[0] is slot
    run.close()


def test_whoever_takes_over_from_a_lost_reporter_counts_no_failure(tmp_path: Path) -> None:
    """The record said that a run was going on, which it was: each reporter that was lost counted
    as a failure that costs the work since the last checkpoint, and it cost none."""
    record = RunRecord(tmp_path, workers=4, is_writer=True)
    assert not record.begin()
    successor = RunRecord(tmp_path, workers=4, is_writer=True)
    assert not successor.begin(is_first=False)
    assert successor.rate.failures == 0
    assert RunRecord(tmp_path, workers=4, is_writer=True).begin()


def test_a_job_that_ended_is_not_told_to_be_running(tmp_path: Path) -> None:
    """The last save ends after the run has said goodbye, and said that it was running: the next
    start counted a failure. So did every stage's saver, with failures of its own: none."""
    train(tmp_path, steps=12)
    assert json.loads((tmp_path / "failures.json").read_text())["is_running"] is False
    again = RunRecord(tmp_path, workers=1, is_writer=True)
    assert not again.begin()
    stranger = RunRecord(tmp_path, workers=1, is_writer=True)
    stranger.note(9.0)
    assert json.loads((tmp_path / "failures.json").read_text())["is_running"] is True, "untouched"


def test_a_part_is_given_up_when_its_generation_is_over(tmp_path: Path) -> None:
    """The same as below, where it depends on the moment of the kill."""
    module = torch.nn.Linear(3, 1)
    stage = StageModule(module=module, names={key: key for key in module.state_dict()})
    settings = EngineSettings(probe_bytes=0, close_timeout_s=30.0)
    saver = StageSaver(
        everstep.Checkpoints(directory=tmp_path, engine=settings),
        StageTree(stage, None, None),
        part=(0, 2),
        total_steps=9,
        num_workers=2,
    )
    saver.save(3, run="generation-1")
    saver.begin(run="generation-2")
    (event,) = saver.close()
    assert event["event"] == "checkpoint_failed"
    assert "parts 1 of 2 have not come" in str(event["why"])


@pytest.mark.timeout(150)
def test_a_save_that_a_failure_has_cut_short_delays_no_end(tmp_path: Path) -> None:
    """A stage had saved its part when the generation ended, and the other never began with its own.
    At its end the job waited a minute for that, and left a writer that waited nine more."""
    run = run_live(
        TESTS / "logged_job.py",
        *("mlp", tmp_path, 16, 5, "all", tmp_path / "out.pt"),
        replicas=2,
        stages=2,
        events=tmp_path / "events.jsonl",
        flags=("--kill", "1:1@6", "--replace-after", "0.1"),
    )
    assert run.status == 0, run.output
    assert "goes on alone" not in run.output
    assert run.left_behind == []
