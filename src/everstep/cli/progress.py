"""What a running job shows: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from everstep.core.events import Event
from everstep.core.sizes import render_bytes

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_EVERY_S = 1.0
"""At most one line a second when nobody can see it change."""

_RATE_OVER_STEPS = 20


class Progress:
    """Subscribed to the events of a job."""

    def __init__(self, *, replicas: int, stages: int) -> None:
        self._num_workers = replicas * stages
        self._num_joined = 0
        self._generation = 0
        self._steps: int | None = None
        self._times: deque[float] = deque(maxlen=_RATE_OVER_STEPS)
        self._shown_s = float("-inf")
        self._held_back = ""
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            # Workers' lines go above the live one, unless they go elsewhere altogether.
            to_terminal = sys.stdout.isatty()
            self._live = Live(console=console, refresh_per_second=8, redirect_stdout=to_terminal)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._held_back:
            self._print(self._held_back)
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        fields: dict[str, Any] = dict(event)
        name = fields["event"]
        if name == "step":
            self._step(fields)
            return
        if name == "generation":
            self._generation = fields["number"]
        if name == "restarting":
            self._num_joined = 0
        if name == "took_over":
            self._generation = fields["generation"]
            self._num_joined = len(fields["workers"])
        self._num_joined += {"worker_joined": 1, "worker_lost": -1, "moving": -1}.get(name, 0)
        if name in _LINES:
            self._say(_LINES[name](fields))
        elif name == "worker_joined" and self._num_joined == self._num_workers:
            self._say(f"all {self._num_workers} workers are here")

    def _step(self, fields: dict[str, Any]) -> None:
        self._times.append(fields["seconds"])
        mean_s = sum(self._times) / len(self._times)
        loss = "" if fields["loss"] is None else f"  loss {fields['loss']:.4f}"
        line = (
            f"step {fields['step']}{loss}  {mean_s * 1e3:.0f} ms/step"
            f"  {self._num_joined} workers  generation {self._generation}"
        )
        if self._live is not None:
            self._live.update(line)
        elif time.monotonic() - self._shown_s >= PLAIN_EVERY_S:
            self._say(line)
        else:
            self._held_back = line

    def _say(self, line: str) -> None:
        self._shown_s = time.monotonic()
        self._held_back = ""
        self._print(line)

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False)
        else:
            # One write with its end: workers' lines go to the same place from other threads. The
            # reader may have left (`| head`); the job has not.
            with suppress(BrokenPipeError):
                sys.stderr.write(f"everstep: {line}\n")
                sys.stderr.flush()


_LINES: dict[str, Callable[[dict[str, Any]], str]] = {
    "started": lambda e: (
        f"{e['address']}: starting {e['replicas']} replicas x {e['stages']} stages"
    ),
    "generation": lambda e: f"generation {e['number']}: {_plan(e)}",
    "took_over": lambda e: (
        f"took over: {len(e['workers'])} workers train on in generation {e['generation']},"
        f" step {e['open_step']}"
    ),
    "replanned": lambda e: f"new plan from step {e['from_step']} on: {_plan(e)}",
    "rollback": lambda e: (
        f"step {e['step']} is taken again: its norm was {e['norm']:.4g}, scaled by {e['scale']:.4g}"
    ),
    "worker_lost": lambda e: (
        f"lost worker {e['replica']}:{e['stage']} (pid {e['pid']}): {e['how']}"
    ),
    "restarting": lambda e: (
        f"{e['reason']}: all workers are started again and load the newest checkpoint"
    ),
    "protection": lambda e: f"a lost stage comes back from: {_protection(e['stages'])}",
    "awaiting": lambda e: f"{_stages(e['stages'])} lost: the others wait for a new worker",
    "rebuilding": lambda e: (
        f"rebuilding {_stages(e['stages'])}: steps {e['checkpoint'] + 1} to {e['last_step']} are"
        f" replayed from the logs by {len(e['replayers'])} workers"
    ),
    "rebuilt": lambda e: f"worker {e['replica']}:{e['stage']} has the state of step {e['step']}",
    "logging": lambda e: (
        f"logs take {render_bytes(e['bytes'])} from one checkpoint to the next;"
        f" {_boundaries(e['unlogged'])}"
    ),
    "restored": lambda e: f"goes on after step {e['step']}, from its checkpoint",
    "checkpoint_failed": lambda e: f"no checkpoint of step {e['step']}: {e['why']}",
    "moving": lambda e: f"worker {e['replica']}:{e['stage']} moves to {e['to']}: {e['reason']}",
    "recovered": lambda e: f"step {e['step']}: recovered in {e['seconds']:.2f} s",
    "finished": lambda e: f"finished {e['steps']} steps in {e['seconds']:.1f} s",
}


def _plan(fields: dict[str, Any]) -> str:
    period, bound = fields["period"], fields["bound"]
    if fields["unit"] == "seconds":
        return f"period {period * 1e3:.1f} ms (bound {bound * 1e3:.1f} ms)"
    return f"period {period:g} {fields['unit']} (bound {bound:g})"


def _protection(by_stage: dict[str, list[str]]) -> str:
    """`copies, checkpoint`, or stage by stage where they differ."""
    means = [", ".join(each) or "nothing (its loss ends the job)" for each in by_stage.values()]
    if len(set(means)) == 1:
        return means[0]
    return "; ".join(f"stage {stage}: {each}" for stage, each in zip(by_stage, means, strict=True))


def _stages(stages: list[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    return f"stages {', '.join(map(str, stages))}"


def _boundaries(boundaries: list[int]) -> str:
    pairs = (f"{boundary}-{boundary + 1}" for boundary in boundaries)
    return (
        f"between stages {', '.join(pairs)} nothing is logged"
        if boundaries
        else "every boundary is logged"
    )
