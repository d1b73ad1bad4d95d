"""`everstep demo`: trains a small GPT on 12 workers of this machine and says what it saw."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from everstep.cli.run import leave, local_coordinator
from everstep.core.events import Event

REPLICAS, STAGES = 3, 4
STEPS = 60

# Not imported: it loads torch, which the other commands do without.
SCRIPT = Path(__file__).with_name("demo_job.py")


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command(
    steps: Annotated[int, typer.Option(help="How many to train.")] = STEPS,
    events: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append events there as JSON lines.")
    ] = None,
) -> None:
    """Trains a small character-level GPT on 12 CPU workers: 3 replicas x 4 stages."""
    from everstep.launch.local import run_local
    from everstep.launch.warm import Script

    print(
        f"Training a character-level GPT on Python's own sources: {REPLICAS} replicas x {STAGES}"
        f" stages, {REPLICAS * STAGES} worker processes, {steps} steps.\n"
    )
    watcher = _Watcher()
    with local_coordinator(REPLICAS, STAGES, events=events, subscriber=watcher.note) as coordinator:
        script = Script(SCRIPT, (str(steps),))
        outcome = run_local(script, coordinator=coordinator)
    leave(outcome)
    print(watcher.verdict())


class _Watcher:
    """Remembers what the verdict needs."""

    def __init__(self) -> None:
        self._steps: list[dict[str, Any]] = []
        self._plan: dict[str, Any] = {}

    def note(self, event: Event) -> None:
        if event["event"] == "step":
            self._steps.append(dict(event))
        elif event["event"] in ("generation", "replanned"):
            self._plan = dict(event)

    def verdict(self) -> str:
        first, last = self._steps[0], self._steps[-1]
        planned_from = self._plan.get("from_step", 0)
        typical_s = median(s["seconds"] for s in self._steps if s["step"] >= planned_from)
        return (
            f"\nloss {first['loss']:.3f} -> {last['loss']:.3f} in {len(self._steps)} steps,"
            f" {typical_s * 1e3:.0f} ms each on two handfuls of processes sharing this machine;"
            f"\nthe plan's period, were each worker alone on its device:"
            f" {self._plan['period'] * 1e3:.0f} ms (bound {self._plan['bound'] * 1e3:.0f} ms)"
        )
