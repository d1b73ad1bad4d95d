"""Kills workers at random moments for a long time and compares every loss with an undisturbed run.

    python benchmarks/soak.py --kills 200

Trains a small GPT (dropout, AdamW) on 3 x 2 workers. Whoever is killed is replaced; a stage keeps
at least one worker that holds its state, because nothing could help without one. Ends with status 1
when a step is missing, comes twice or has another loss.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep.core.ids import WorkerId
from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss

REPLICAS, STAGES = 3, 2
RELATIVE = 1e-5
Event = dict[str, Any]


def work(steps: int) -> None:
    """The script of a worker."""
    job = everstep.Job(
        model=lambda: char_gpt(width=16, blocks=3, length=16),
        loss=next_character_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        dataset=Characters(length=16, last=3000),
        batch_size=36,
        microbatches=3,
    )
    for _ in everstep.train(job, steps=steps):
        pass


class Crew:
    """Who is there, by the events, and whom one may kill."""

    def __init__(self) -> None:
        self.pids: dict[WorkerId, int] = {}
        self.num_joined = 0
        self._members: set[WorkerId] = set()
        self._seasoned: set[WorkerId] = set()

    def note(self, event: Event) -> None:
        match event:
            case {"event": "worker_joined", "replica": r, "stage": s, "pid": pid}:
                self.pids[WorkerId(r, s)] = pid
                self.num_joined += 1
            case {"event": "worker_lost", "replica": r, "stage": s}:
                self.lose(WorkerId(r, s))
            case {"event": "generation", "lost": lost}:
                gone = {WorkerId.parse(text, field="lost") for text in lost}
                self._members = self.pids.keys() - gone
            case {"event": "step"}:
                # A step after it joined: its copy of the state is complete.
                self._seasoned = self._members & self.pids.keys()
            case _:
                pass

    def lose(self, place: WorkerId) -> None:
        self.pids.pop(place, None)
        self._members.discard(place)
        self._seasoned.discard(place)

    def candidates(self) -> list[WorkerId]:
        per_stage = Counter(place.stage for place in self._seasoned)
        return sorted(place for place in self._seasoned if per_stage[place.stage] > 1)


def run(folder: Path, *, steps: int, kills: int, seed: int) -> list[Event]:
    events = folder / f"events-{kills}.jsonl"
    events.touch()
    command = [sys.executable, "-c", "from everstep.cli.main import main; main()", "run"]
    command += ["--replicas", str(REPLICAS), "--stages", str(STAGES), "--replace-after", "0.1"]
    command += ["--events", str(events), __file__, "--worker", str(steps)]
    output = (folder / f"output-{kills}.txt").open("w")
    with output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            found = _follow(events, process, kills=kills, chance=random.Random(seed))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
    if process.returncode != 0:
        sys.exit(f"everstep run ended with {process.returncode}; see {folder}")
    return found


def _follow(
    path: Path, process: subprocess.Popen[bytes], *, kills: int, chance: random.Random
) -> list[Event]:
    """Reads events as they come and kills now and then, until the job is over."""
    crew, events, num_killed, due_s, line = Crew(), [], 0, 0.0, ""
    with path.open() as file:
        while True:
            line += file.readline()  # perhaps only the beginning of one
            if line.endswith("\n"):
                events.append(json.loads(line))
                crew.note(events[-1])
                line = ""
                continue
            if process.poll() is not None:
                break
            candidates = crew.candidates()
            if num_killed < kills and candidates and time.monotonic() >= due_s:
                victim = chance.choice(candidates)
                with suppress(ProcessLookupError):
                    os.kill(crew.pids[victim], signal.SIGKILL)
                crew.lose(victim)
                num_killed += 1
                due_s = time.monotonic() + chance.expovariate(2.0)
            time.sleep(0.002)
    if num_killed < kills:
        sys.exit(f"the job was over after {num_killed} of {kills} kills: raise --steps-per-kill")
    print(f"{num_killed} kills, {crew.num_joined - REPLICAS * STAGES} joins")
    return events


def of(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def compare(disturbed: list[Event], quiet: list[Event], *, steps: int) -> bool:
    found, expected = of(disturbed, "step"), of(quiet, "step")
    is_complete = [event["step"] for event in found] == list(range(steps))
    losses = {event["step"]: event["loss"] for event in expected}
    worst = max(abs(e["loss"] - losses[e["step"]]) / abs(losses[e["step"]]) for e in found)
    print(f"{len(found)} of {steps} steps, each once: {is_complete}")
    print(f"largest relative difference of a loss: {worst:.2e} (limit {RELATIVE:.0e})")
    return is_complete and worst <= RELATIVE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-per-kill", type=int, default=25)
    parser.add_argument("--worker", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
        return
    steps = options.kills * options.steps_per_kill
    folder = Path(tempfile.mkdtemp(prefix="everstep-soak-"))
    print(f"seed {options.seed}, {steps} steps, events and output in {folder}")
    disturbed = run(folder, steps=steps, kills=options.kills, seed=options.seed)
    quiet = run(folder, steps=steps, kills=0, seed=options.seed)
    seconds = sorted(event["seconds"] for event in of(disturbed, "recovered"))
    print(
        f"{len(of(disturbed, 'generation'))} generations, {len(seconds)} recoveries:"
        f" median {statistics.median(seconds):.2f} s, worst {seconds[-1]:.2f} s"
    )
    sys.exit(0 if compare(disturbed, quiet, steps=steps) else 1)


if __name__ == "__main__":
    main()
