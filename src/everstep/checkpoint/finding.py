"""Which checkpoint to go on from: the newest good one, and the same one for everybody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from everstep.checkpoint.agreement import Agreement
from everstep.checkpoint.remote_storage import fetch_step, is_url
from everstep.checkpoint.restore import Found, first_good, look_at, wait_writers
from everstep.checkpoint.storage import step_name
from everstep.core.errors import CheckpointCorrupt, ConfigError

_Result = TypeVar("_Result")


def find_agreed(directory: str | Path, agreement: Agreement, *, wait_s: float) -> Found | None:
    """Rank 0 looks and verifies, the others are told: one may be finished while they look."""
    found = None
    if agreement.rank == 0:
        found = find_newest(directory, Found.verified, wait_s=wait_s)
    step = agreement.share(-1 if found is None else found.step)
    if step < 0 or agreement.rank == 0:
        return found
    return find_step(directory, step)


def find_newest(
    directory: str | Path, use: Callable[[Found], _Result], *, wait_s: float
) -> _Result | None:
    """What `use` makes of the newest one that it finds nothing wrong with; None: there are none."""
    try:
        wait_writers(directory, timeout_s=wait_s)
        return first_good(directory, use)
    except OSError as error:
        # To begin anew here could be to throw away what is there.
        rule = f"whether it holds checkpoints cannot be seen: {error.strerror or error}"
        raise ConfigError("directory", directory, rule) from error


def find_step(directory: str | Path, step: int) -> Found:
    """One that another process has found; from a URL it is brought here."""
    if is_url(directory):
        path = fetch_step(str(directory), step)
    else:
        path = Path(directory) / step_name(step)
    seen = look_at(path)
    if not isinstance(seen, Found):
        raise CheckpointCorrupt(str(path), why=seen.why)
    return seen
