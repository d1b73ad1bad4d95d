"""Which checkpoint to go on from: the newest good one, and the same one on every rank."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint.agreement import Agreement
from everstep.checkpoint.remote_storage import fetch_step, is_url
from everstep.checkpoint.restore import Found, look_at, newest, wait_writers
from everstep.checkpoint.storage import step_name
from everstep.core.errors import CheckpointCorrupt, ConfigError


def find_agreed(directory: str | Path, agreement: Agreement, *, wait_s: float) -> Found | None:
    """Rank 0 looks and verifies, the others are told: one may be finished while they look."""
    found = _find_newest(directory, wait_s) if agreement.rank == 0 else None
    step = agreement.share(-1 if found is None else found.step)
    if step < 0 or agreement.rank == 0:
        return found
    seen = look_at(_path_of(directory, step))
    if not isinstance(seen, Found):
        raise CheckpointCorrupt(str(seen.path), why=f"{seen.why}, but rank 0 could read it")
    return seen


def _find_newest(directory: str | Path, wait_s: float) -> Found | None:
    try:
        wait_writers(directory, timeout_s=wait_s)
        return newest(directory)
    except OSError as error:
        # To begin anew here could be to throw away what is there.
        rule = f"whether it holds checkpoints cannot be seen: {error.strerror or error}"
        raise ConfigError("directory", directory, rule) from error


def _path_of(directory: str | Path, step: int) -> Path:
    if is_url(directory):
        return fetch_step(str(directory), step)
    return Path(directory) / step_name(step)
