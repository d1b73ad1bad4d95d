"""Runs `chaos_job` under a fault script and checks what every such run must keep."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import chaos_job
from everstep.testing.char_gpt import next_character_loss
from everstep.testing.faults import FaultScript, played_faults
from everstep.testing.reference import Reference, plain_training
from live import LiveRun, run_live

# The machine's cores are for the workers, whose threads these would fight with.
torch.set_num_threads(1)

RELATIVE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    live: LiveRun
    script: FaultScript
    played: set[int]
    notes: list[dict[str, Any]]
    """What the workers that saw the end left; see `chaos_job.Note`."""

    def __str__(self) -> str:
        """For the message of a failed test: enough to run it again and to see where it went."""
        log = [json.dumps(event)[:300] for event in self.live.events if event["event"] != "step"]
        return "\n".join(
            [f"faults: {self.script}", f"played: {self.played}", self.live.output, *log]
        )


def run_chaos(
    folder: Path,
    faults: str | FaultScript,
    *,
    replicas: int = 3,
    stages: int = 2,
    steps: int = 20,
    replace_after: str = "never",
    job_flags: Sequence[str] = (),
) -> ChaosRun:
    script = FaultScript.parse(faults) if isinstance(faults, str) else faults
    live = run_live(
        Path(chaos_job.__file__),
        *(folder, "--steps", steps, "--faults", str(script), *job_flags),
        replicas=replicas,
        stages=stages,
        events=folder / "events.jsonl",
        flags=["--replace-after", replace_after],
    )
    return ChaosRun(
        live=live,
        script=script,
        played=played_faults(folder / chaos_job.FAULT_LOG),
        notes=[json.loads(path.read_text()) for path in sorted(folder.glob("*.note"))],
    )


@cache
def reference(replicas: int, stages: int, steps: int, clip_norm: float | None = None) -> Reference:
    return plain_training(
        chaos_job.build,
        next_character_loss,
        chaos_job.adamw,
        chaos_job.DATASET,
        batch_size=chaos_job.BATCH_SIZE,
        replicas=replicas,
        microbatches=chaos_job.MICROBATCHES,
        num_stages=stages,
        steps=steps,
        seed=chaos_job.SEED,
        clip_norm=clip_norm,
        scheduler=chaos_job.schedule,
    )


def check_unharmed(run: ChaosRun, expected: Reference) -> None:
    """The script was played, and nothing of it can be seen in the numbers."""
    assert run.live.status == 0, run
    assert run.played == set(range(len(run.script.faults))), f"not every fault happened: {run}"
    check_losses(run, expected)
    check_equal_states(run)


def check_losses(run: ChaosRun, expected: Reference) -> None:
    steps = run.live.of("step")
    assert [event["step"] for event in steps] == list(range(len(expected.losses))), run
    losses = [event["loss"] for event in steps]
    assert losses == pytest.approx(expected.losses, rel=RELATIVE), run


def check_equal_states(run: ChaosRun) -> None:
    """All live workers of a stage hold the same bits."""
    states: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for note in run.notes:
        states[note["place"].partition(":")[2]].add((note["module"], note["optimizer"]))
    assert states, run
    assert all(len(found) == 1 for found in states.values()), f"{dict(states)}\n{run}"
    assert len([note for note in run.notes if note["weights"] is not None]) == 1, run
