"""How a worker process learns who it is: the launcher's environment variables, read only here."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.core.errors import ConfigError
from everstep.membership.client import Client, OnHalt, connect
from everstep.membership.messages import Hello

PREFIX = "EVERSTEP_"


@dataclass(slots=True, kw_only=True)
class WorkerContext:
    """Who this process is, and its one connection to the coordinator."""

    coordinator: str
    """`HOST:PORT`."""

    uid: str
    number: int
    host: str
    """The address at which other workers reach this machine."""

    local_number: int = 0
    """Among the workers of this machine: a replacement has its predecessor's."""

    num_local: int = 1

    token: str = field(default="", repr=False)
    client: Client | None = None
    """Stays open until the script has ended, so that a late exception can still be reported."""

    _callbacks: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def connect(self, *, data_address: str, on_halt: OnHalt | None = None) -> Client:
        """Says Hello. Once per process: the coordinator knows a process by its uid."""
        if self.client is not None:
            raise ConfigError(
                "everstep.train", "called again", "a process trains one job, with one call"
            )
        hello = Hello(
            uid=self.uid,
            number=self.number,
            pid=os.getpid(),
            host=self.host,
            data_address=data_address,
        )
        self.client = connect(self.coordinator, hello=hello, token=self.token, on_halt=on_halt)
        return self.client

    def on_close(self, callback: Callable[[], None]) -> None:
        """Runs `callback` when the script has ended, before the connection closes."""
        self._callbacks.append(callback)

    def close(self) -> None:
        while self._callbacks:
            self._callbacks.pop()()
        if self.client is not None:
            self.client.close()

    def environment(self) -> dict[str, str]:
        return {
            f"{PREFIX}COORDINATOR": self.coordinator,
            f"{PREFIX}UID": self.uid,
            f"{PREFIX}NUMBER": str(self.number),
            f"{PREFIX}HOST": self.host,
            f"{PREFIX}LOCAL_NUMBER": str(self.local_number),
            f"{PREFIX}NUM_LOCAL": str(self.num_local),
            f"{PREFIX}TOKEN": self.token,
        }


def read_context(environment: Mapping[str, str]) -> WorkerContext | None:
    if f"{PREFIX}COORDINATOR" not in environment:
        return None
    return WorkerContext(
        coordinator=environment[f"{PREFIX}COORDINATOR"],
        uid=environment[f"{PREFIX}UID"],
        number=int(environment[f"{PREFIX}NUMBER"]),
        host=environment[f"{PREFIX}HOST"],
        local_number=int(environment[f"{PREFIX}LOCAL_NUMBER"]),
        num_local=int(environment[f"{PREFIX}NUM_LOCAL"]),
        token=environment[f"{PREFIX}TOKEN"],
    )


@functools.cache
def current_worker() -> WorkerContext | None:
    """This process's place in a job; None when it was started as plain `python train.py`."""
    return read_context(os.environ)
