"""`everstep demo`: trains a small GPT twice, once undisturbed and once with workers killed.

Ends with the verdict: steps lost, the largest difference of the loss, recovery times.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from everstep.cli.run import leave, local_coordinator
from everstep.core.events import Event, Subscriber
from everstep.core.ids import WorkerId

REPLICAS, STAGES = 3, 4
REPLACE_AFTER_S = 3.0

FIRST_KILL = (WorkerId(1, 2),)
SECOND_KILL = (WorkerId(0, 1), WorkerId(2, 3))
STEPS = 60

# Not imported: it loads torch, which the other commands do without.
SCRIPT = Path(__file__).with_name("demo_job.py")


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo_command)


def demo_command(
    steps: Annotated[int, typer.Option(help="How many to train.")] = STEPS,
    events: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the disturbed run's events there."),
    ] = None,
) -> None:
    """Trains a small GPT on 12 CPU workers, kills three of them, and says what it cost."""
    from everstep.testing.faults import KillAt, Killer

    print(
        f"A character-level GPT on Python's own sources: {REPLICAS} replicas x {STAGES} stages,"
        f" {REPLICAS * STAGES} worker processes, {steps} steps.\n"
    )
    print("== Undisturbed, to compare with\n", flush=True)
    calm = _Watcher()
    _train(steps, calm.note, events=None)
    print("\n== Again. One worker is killed, then two at once; new ones join\n", flush=True)
    kills = [KillAt(place, steps // 4) for place in FIRST_KILL]
    kills += [KillAt(place, steps // 2) for place in SECOND_KILL]
    killer, stormy = Killer(kills), _Watcher(is_shown=True)

    def note(event: Event) -> None:
        stormy.note(event)
        killer.note(event)

    _train(steps, note, events=events)
    print(f"\n== Verdict\n\n{_verdict(calm, stormy, steps)}")


def _train(steps: int, subscriber: Subscriber, *, events: Path | None) -> None:
    from everstep.launch.local import run_local
    from everstep.launch.warm import Script

    with local_coordinator(
        REPLICAS, STAGES, events=events, replace_after_s=REPLACE_AFTER_S, subscriber=subscriber
    ) as coordinator:
        script = Script(SCRIPT, (str(steps),))
        outcome = run_local(script, coordinator=coordinator)
    leave(outcome)


class _Watcher:
    """Remembers what the verdict needs, and draws the workers at each generation."""

    def __init__(self, *, is_shown: bool = False) -> None:
        self._is_shown = is_shown
        self.losses: dict[int, float] = {}
        self.num_repeated = 0
        self.seconds: list[float] = []
        self.outages: list[dict[str, Any]] = []
        self.num_lost = 0
        self.num_joined = 0

    def note(self, event: Event) -> None:
        fields: dict[str, Any] = dict(event)
        match fields["event"]:
            case "step":
                self.num_repeated += fields["step"] in self.losses
                self.losses[fields["step"]] = fields["loss"]
                self.seconds.append(fields["seconds"])
            case "recovered":
                self.outages.append(fields)
            case "worker_lost":
                self.num_lost += 1
            case "worker_joined":
                self.num_joined += 1
            case "generation" if self._is_shown:
                print(_map(fields), flush=True)
            case _:
                pass


def _map(generation: dict[str, Any]) -> str:
    """The workers of a generation: one row per stage.

    stage 0   o o o
    stage 1   o x o     x is lost
    """
    lost = set(generation["lost"])
    rows = [
        f"  stage {stage}   "
        + " ".join("x" if f"{r}:{stage}" in lost else "o" for r in range(REPLICAS))
        for stage in range(STAGES)
    ]
    if generation["unit"] == "seconds":
        rows[0] += (
            f"     period {generation['period'] * 1e3:.0f} ms,"
            f" bound {generation['bound'] * 1e3:.0f} ms (each worker alone on its device)"
        )
    rows[1] += f"     {generation['decision']}"
    return "\n".join([f"  generation {generation['number']}", *rows])


def _verdict(calm: _Watcher, stormy: _Watcher, steps: int) -> str:
    num_missing = steps - len(stormy.losses)
    difference = max(
        abs(stormy.losses[step] - loss) / abs(loss)
        for step, loss in calm.losses.items()
        if step in stormy.losses
    )
    outages = ", ".join(
        f"{outage['seconds']:.2f} s ({' and '.join(outage['lost'])})" for outage in stormy.outages
    )
    return "\n".join(
        [
            f"  workers killed            {stormy.num_lost}, new ones joined"
            f" {stormy.num_joined - REPLICAS * STAGES}",
            f"  steps lost                {num_missing}, run twice in the books"
            f" {stormy.num_repeated}",
            f"  largest difference of the loss to the undisturbed run: {difference:.1e} relative",
            f"  from each loss to the next finished step: {outages or 'no loss was seen'}",
            f"  a step takes {median(calm.seconds) * 1e3:.0f} ms undisturbed,"
            f" {median(stormy.seconds) * 1e3:.0f} ms here (all processes share this machine)",
        ]
    )
