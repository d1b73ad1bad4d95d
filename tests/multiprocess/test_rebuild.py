"""Stages that nobody holds any more, live: each hole that rebuilding from logs may fall into."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equality_job import plain
from live import TESTS, Live, LiveRun, command, of, read_events, run_live

pytestmark = pytest.mark.timeout(150)

SCRIPT = TESTS / "logged_job.py"
SPILLING = "16KB"
"""Of a log that grows to 50 KB: the first steps are spilled, and none is dropped."""

CLOSE = partial(pytest.approx, rel=1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    run: LiveRun
    indices: list[int]
    """That the reporter's script was given, the last one's if there were several."""

    weights: dict[str, Tensor]

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.run.of("step")]

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.run.of("step")]

    @property
    def rebuilt(self) -> list[list[int]]:
        """The stages of each replay that was begun."""
        return [event["stages"] for event in self.run.of("rebuilding")]

    @property
    def resumed_at(self) -> list[int]:
        return [event["resume_step"] for event in self.run.of("generation")[1:]]

    def equals(self, other: Trained) -> bool:
        """Bit for bit: with the weights, what made them is right, optimizers and all."""
        names = self.weights.keys()
        return self.losses == other.losses and all(
            torch.equal(self.weights[name], other.weights[name]) for name in names
        )


def run_live_job(
    folder: Path,
    *options: str,
    model: str = "mlp",
    steps: int = 16,
    every: int = 5,
    helpers: str = "all",
    shape: tuple[int, int] = (1, 3),
    flags: Sequence[str] = (),
) -> LiveRun:
    run = run_live(
        SCRIPT,
        *(model, folder, steps, every, helpers, folder / "out.pt", *options),
        replicas=shape[0],
        stages=shape[1],
        events=folder / "events.jsonl",
        flags=flags,
    )
    assert run.status == 0, run.output
    assert run.left_behind == []
    return run


def train(folder: Path, *options: str, steps: int = 16, **settings: Any) -> Trained:
    run = run_live_job(folder, *options, steps=steps, **settings)
    return read_trained(run, folder, steps=steps)


def read_trained(run: LiveRun, folder: Path, *, steps: int) -> Trained:
    trained = Trained(run=run, **torch.load(folder / "out.pt"))
    assert trained.steps == list(range(steps)), "each step is told once"
    return trained


def expected_losses(
    *, steps: int = 16, shape: tuple[int, int] = (1, 3), clip_norm: float | None = None
) -> list[float]:
    """Of the MLP, by plain PyTorch."""
    torch.set_num_threads(1)
    replicas, stages = shape
    return plain(
        "mlp", "adamw", replicas=replicas, stages=stages, steps=steps, clip_norm=clip_norm
    ).losses


# The bar: a GPT with dropout and AdamW, 60 steps, checkpoints every 20, killed at step 35.

train_gpt = partial(train, model="gpt", steps=60, every=20, shape=(1, 4))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_gpt(tmp_path_factory.mktemp("undisturbed"), helpers="0")


@pytest.mark.parametrize("stage", range(4))
def test_whichever_stage_is_lost_alone_it_comes_back_bit_for_bit(
    tmp_path: Path, undisturbed: Trained, stage: int
) -> None:
    """The first, which reads the data, and the last, whose worker reports, among them."""
    trained = train_gpt(tmp_path, "--die", f"0:{stage}@35", helpers="0")
    assert trained.rebuilt == [[stage]]
    assert trained.resumed_at == [35], "nobody goes back"
    assert trained.run.of("restarting") == []
    assert trained.equals(undisturbed)
    assert trained.indices == list(range(35 if stage == 3 else 0, 60))


def test_logging_goes_on_after_a_replay_that_others_helped_with(
    tmp_path: Path, undisturbed: Trained
) -> None:
    """The second loss needs what the first one's replacement, and its helpers, logged again."""
    trained = train_gpt(tmp_path, "--die", "0:1@35", "--die", "0:2@38", helpers="all")
    assert trained.rebuilt == [[1], [2]]
    assert [event["is_shared"] for event in trained.run.of("rebuilding")] == [True, True]
    assert [len(event["replayers"]) for event in trained.run.of("rebuilding")] == [3, 3]
    assert trained.resumed_at == [35, 38]
    assert trained.losses == CLOSE(undisturbed.losses)


# Losses in a row, together, and in the middle of a replay.


def test_the_same_stage_and_then_another_are_lost_before_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    kills = ("--die", "0:1@7", "--die", "0:1@9", "--die", "0:2@11")
    trained = train(tmp_path, *kills, every=30, helpers="0")
    assert trained.rebuilt == [[1], [1], [2]]
    assert {event["checkpoint"] for event in trained.run.of("rebuilding")} == {-1}
    assert trained.resumed_at == [7, 9, 11]
    assert trained.losses == CLOSE(expected_losses())


@pytest.mark.parametrize("every", [5, 30])
def test_a_neighbour_that_helped_and_is_lost_next_is_replayed_alone(
    tmp_path: Path, every: int
) -> None:
    """What helpers found that the lost stage had sent to them was logged by themselves, and so was
    lost with them: the next replay was of two stages, and took twice as long."""
    kills = ("--die", "0:1@7", "--die", "0:0@8", "--die", "0:2@9")
    trained = train(tmp_path, *kills, every=every)
    assert trained.rebuilt == [[1], [0], [2]]
    assert all(event["is_shared"] for event in trained.run.of("rebuilding"))
    assert trained.resumed_at == [7, 8, 9]
    assert trained.losses == CLOSE(expected_losses())


def test_neighbours_lost_together_are_replayed_as_one_range(tmp_path: Path) -> None:
    """What they logged for each other is gone."""
    trained = train(tmp_path, "--die", "0:1@13", "--die", "0:2@13")
    assert trained.rebuilt == [[1, 2]]
    assert trained.resumed_at == [13]
    assert trained.losses == CLOSE(expected_losses())


def test_a_replacement_and_then_a_helper_are_lost_during_the_replay(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    arguments = ("mlp", tmp_path, 16, 30, "all", tmp_path / "out.pt")
    options = ("--die", "0:0@13", "--sample-s", 0.002)
    shape = ("--replicas", 1, "--stages", 3, "--events", events)
    with Live(command("run", *shape, SCRIPT, *arguments, *options)) as live:
        live.wait_events(events, "rebuilding", 1)
        os.kill(newest_pid(events, stage=0), signal.SIGKILL)
        live.wait_events(events, "rebuilding", 2)
        os.kill(newest_pid(events, stage=1), signal.SIGKILL)
        status, output = live.wait()
        left_behind = live.left_behind()
    assert status == 0, output
    assert left_behind == []
    run = LiveRun(status=status, output=output, events=read_events(events))
    trained = read_trained(run, tmp_path, steps=16)
    assert trained.rebuilt == [[0], [0], [0, 1]]
    assert len(run.of("worker_lost")) == 3
    assert trained.resumed_at == [13, 13, 13]
    assert trained.losses == CLOSE(expected_losses())


def newest_pid(events: Path, *, stage: int) -> int:
    joined = of(read_events(events), "worker_joined")
    pid: int = [event["pid"] for event in joined if event["stage"] == stage][-1]
    return pid


# What else a step is made of.


@pytest.mark.parametrize("mode", ["synchronous", "post-validated"])
def test_steps_that_were_clipped_are_clipped_alike_in_a_replay(tmp_path: Path, mode: str) -> None:
    """Only the stages together know the norm; a replay has one of them."""
    expected = expected_losses(clip_norm=0.3)
    assert expected != CLOSE(expected_losses()), "it clips nothing"
    trained = train(tmp_path, "--die", "0:1@13", "--clip", f"{mode}:0.3", helpers="0")
    assert trained.rebuilt == [[1]]
    assert trained.resumed_at[-1] <= 16
    assert trained.losses == CLOSE(expected)


def test_both_workers_of_a_stage_come_back_equal(tmp_path: Path) -> None:
    kills = ("--die", "0:1@13", "--die", "1:1@13")
    trained = train(tmp_path, *kills, "--with-replicas", shape=(2, 2))
    assert trained.rebuilt == [[1]]
    assert trained.losses == CLOSE(expected_losses(shape=(2, 2)))
    first, second = (torch.load(tmp_path / f"stage-1-{replica}.pt") for replica in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# Where there is no way to replay, everybody begins with a checkpoint, and it is said why.


def check_restarted(run: LiveRun, *, reason: str, rung: str = "checkpoint") -> None:
    (restarting,) = run.of("restarting")
    assert reason in restarting["reason"]
    afterwards = of(run.events[run.events.index(restarting) :], "generation")
    assert afterwards[0]["rungs"] == dict.fromkeys("012", rung)
    losses = {event["step"]: event["loss"] for event in run.of("step")}
    assert losses == CLOSE({step: expected_losses()[step] for step in losses})


def test_a_stage_lost_in_an_evaluation_is_not_replayed(tmp_path: Path) -> None:
    """A new worker's script would not take part in what the others were interrupted in."""
    trained = train(tmp_path, "--evaluate-after", "9", "--die-evaluating", "0:1")
    assert trained.rebuilt == []
    check_restarted(trained.run, reason="was in an evaluation, where a new one cannot take part")


def test_a_stage_that_nobody_is_started_for_is_not_replayed(tmp_path: Path) -> None:
    trained = train(tmp_path, "--die", "0:1@13", flags=("--replace-after", "never"))
    assert trained.rebuilt == []
    check_restarted(trained.run, reason="nobody is started in the place of stage 1")


def test_a_damaged_log_makes_the_range_larger(tmp_path: Path) -> None:
    damage = ("--memory", SPILLING, "--damage-log", "0")
    trained = train(tmp_path, "--die", "0:1@13", *damage, every=30)
    assert trained.rebuilt == [[1], [0, 1]]
    assert trained.resumed_at == [13, 13]
    assert trained.losses == CLOSE(expected_losses())


def test_with_all_logs_damaged_and_no_checkpoint_everybody_begins_anew(tmp_path: Path) -> None:
    damage = ("--memory", SPILLING, "--damage-log", "0", "--damage-log", "2")
    trained = train(tmp_path, "--die", "0:1@13", *damage, every=30)
    assert trained.rebuilt[0] == [1]
    check_restarted(trained.run, reason="is missing step", rung="continue")


def test_a_damaged_checkpoint_makes_everybody_begin_with_an_older_one(tmp_path: Path) -> None:
    run_live_job(tmp_path, "--sample-s", "0.005", steps=9, every=3)  # so slow that all are saved
    run = run_live_job(tmp_path, "--die", "0:1@13", "--damage-checkpoint", every=30)
    assert {tuple(event["stages"]) for event in run.of("rebuilding")} == {(1,)}
    assert {event["checkpoint"] for event in run.of("rebuilding")} == {8}
    first, second = (event["step"] for event in run.of("restored"))
    assert first == 8
    assert second < 8
    assert [event["step"] for event in run.of("step")] == list(range(16))
    check_restarted(run, reason="replays have failed")
