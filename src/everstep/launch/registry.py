"""Which jobs run on this machine: one small file for each, so that `everstep status` finds them.

A file holds the address and the token of a coordinator, readable by its user alone; it goes with
the process, and those of processes that were killed are swept up by whoever looks.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    address: str
    token: str
    pid: int


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(runtime) / f"everstep-{os.getuid()}"


@contextmanager
def announced(address: str, *, token: str) -> Iterator[None]:
    """While the block runs, this process is known to coordinate a job at `address`."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"address": address, "token": token}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_jobs() -> list[RunningJob]:
    """The newest first."""
    found = []
    for path in _folder().glob("*.json"):
        with suppress(OSError, ValueError):
            if not _is_alive(int(path.stem)):
                path.unlink(missing_ok=True)
                continue
            document = json.loads(path.read_text())
            job = RunningJob(
                address=document["address"], token=document["token"], pid=int(path.stem)
            )
            found.append((path.stat().st_mtime, job))
    return [job for _, job in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
