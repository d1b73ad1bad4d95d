"""What a running job shows: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from everstep.core.events import Event

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
        match fields["event"]:
            case "started":
                self._say(f"{fields['address']}: starting {self._num_workers} workers")
            case "worker_joined":
                self._num_joined += 1
                if self._num_joined == self._num_workers:
                    self._say(f"all {self._num_workers} workers are here")
            case "generation":
                self._generation = fields["number"]
                self._say(f"generation {fields['number']}: {_plan(fields)}")
            case "replanned":
                self._say(f"new plan from step {fields['from_step']} on: {_plan(fields)}")
            case "rollback":
                self._say(
                    f"step {fields['step']} is taken again: its norm was {fields['norm']:.4g},"
                    f" scaled by {fields['scale']:.4g}"
                )
            case "worker_lost":
                self._say(
                    f"lost worker {fields['replica']}:{fields['stage']} (pid {fields['pid']}):"
                    f" {fields['how']}"
                )
            case "step":
                self._step(fields)
            case "finished":
                self._say(f"finished {fields['steps']} steps in {fields['seconds']:.1f} s")
            case _:
                pass

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


def _plan(fields: dict[str, Any]) -> str:
    period, bound = fields["period"], fields["bound"]
    if fields["unit"] == "seconds":
        return f"period {period * 1e3:.1f} ms (bound {bound * 1e3:.1f} ms)"
    return f"period {period:g} {fields['unit']} (bound {bound:g})"
