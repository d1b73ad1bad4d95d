"""Faults on purpose: workers that are killed or frozen at a step. For demos, tests and drills.

everstep run --kill 1:2@40 ...      kill -9 of worker 1:2 while step 40 is under way
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from everstep.core.errors import ConfigError
from everstep.core.events import Event
from everstep.core.ids import WorkerId


@dataclass(frozen=True, slots=True)
class KillAt:
    place: WorkerId
    step: int

    @classmethod
    def parse(cls, text: str, *, field: str) -> KillAt:
        match = re.fullmatch(r"(\d+:\d+)@(\d+)", text.strip())
        if match is None:
            raise ConfigError(field, text, "must be REPLICA:STAGE@STEP, such as 1:2@40")
        return cls(WorkerId.parse(match[1], field=field), int(match[2]))


class Killer:
    """Subscribed to the events of a job on this machine; knows its workers' processes from them."""

    def __init__(self, kills: Sequence[KillAt]) -> None:
        self._kills = list(kills)
        self._pids: dict[WorkerId, int] = {}

    def note(self, event: Event) -> None:
        match event:
            case {"event": "worker_joined", "replica": int(r), "stage": int(s), "pid": int(pid)}:
                self._pids[WorkerId(r, s)] = pid
            case {"event": "generation", "number": 1}:
                self._kill(during_step=0)
            case {"event": "step", "step": int(step)}:
                self._kill(during_step=step + 1)
            case _:
                pass

    def _kill(self, *, during_step: int) -> None:
        due = [kill for kill in self._kills if kill.step <= during_step]
        self._kills = [kill for kill in self._kills if kill.step > during_step]
        for kill in due:
            with suppress(ProcessLookupError):
                os.kill(self._pids[kill.place], signal.SIGKILL)
