"""A directory of checkpoints: how parts become one, how one becomes visible, how one goes.

    DIRECTORY/.step-000000042.RUN.partial/   while parts are written: looked at by nobody else
    DIRECTORY/step-000000042/                a checkpoint: shards and manifest.json
    DIRECTORY/.step-000000042.X.removed/     on its way out
    DIRECTORY/.lock                          held while names change

Every change of names happens under the lock, which dies with its holder. Invariant: a directory
named step-* was complete and on disk before it got that name.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from everstep.checkpoint.disk import Disk, LocalDisk, OpenFile, is_held, write_file
from everstep.checkpoint.manifest import (
    MANIFEST_FILE,
    BadDocument,
    Manifest,
    PartRecord,
    join_parts,
    lacking,
    part_file_name,
    seal,
    shard_file_name,
    unseal_manifest,
    unseal_part,
)
from everstep.checkpoint.retention import Entry
from everstep.core.errors import WaitTimedOut

LOCK_WITHIN_S = 60.0
_STEP = re.compile(r"step-(\d{9,})")
_PARTIAL = re.compile(r"\.step-(\d{9,})\.([\w-]*)\.partial")
_REMOVED = re.compile(r"\.step-\d{9,}\.\w+\.removed")


class Storage(Protocol):
    """Where a writer puts its part, and how the parts become a checkpoint."""

    @property
    def directory(self) -> Path:
        """The local one that shards are written to."""
        ...

    def open_part(self, step: int, run: str, index: int, *, of: int) -> OpenFile:
        """A new shard, held: while it is open, nobody takes it for a dead writer's."""

    def add_part(self, record: PartRecord) -> None:
        """The shard is on disk. So is its record after this, when there are others to read it."""

    def try_commit(self, step: int, run: str, *, of: int) -> list[int]:
        """The parts that are still missing; none: the checkpoint is there, and on disk."""

    def are_coming(self, step: int, run: str, missing: Sequence[int], *, of: int) -> bool | None:
        """Whether a live process works on one of these parts; None when that cannot be told."""

    def discard_part(self, step: int, run: str, index: int, *, of: int) -> None: ...

    def saved(self) -> list[Entry]: ...

    def remove(self, step: int) -> None:
        """It is no checkpoint any more when this returns."""

    def sweep(self) -> None:
        """Frees what the removed ones took. On any thread; takes as long as it takes."""

    def clean(self) -> None:
        """Removes what dead writers left."""


def step_name(step: int) -> str:
    return f"step-{step:09}"


def partial_name(step: int, run: str) -> str:
    return f".{step_name(step)}.{run}.partial"


def steps_in(directory: Path) -> list[int]:
    """The steps that have a directory, newest first. Whether they are good is another question."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)


def is_being_written(partial: Path) -> bool:
    """Whether some live process still works on one of its shards."""
    return any(is_held(shard) for shard in partial.glob("shard-*"))


def partials_in(directory: Path) -> list[Path]:
    return [path for path in directory.glob(".step-*.partial") if _PARTIAL.fullmatch(path.name)]


class LocalStorage:
    def __init__(self, directory: Path, *, disk: Disk | None = None) -> None:
        self._directory = directory
        self._disk = disk or LocalDisk()
        self._losses: dict[int, float | None] = {}
        self._alone: PartRecord | None = None
        """A part that is the whole checkpoint: nobody else has to find its record on disk."""

    @property
    def directory(self) -> Path:
        return self._directory

    def open_part(self, step: int, run: str, index: int, *, of: int) -> OpenFile:
        self._ensure()
        partial = self.partial(step, run)
        with self.locked():  # or `clean` could come between the directory and the hold
            self._disk.make_directory(partial)
            shard = self._disk.create(partial / shard_file_name(index, of), is_direct=True)
            shard.hold()
        return shard

    def partial(self, step: int, run: str) -> Path:
        return self._directory / partial_name(step, run)

    def add_part(self, record: PartRecord) -> None:
        if record.of == 1:
            self._alone = record
            return
        partial = self.partial(record.step, record.run)
        with self.locked():  # or another could commit, and rename, between the two
            write_file(self._disk, partial / part_file_name(record.index), seal(record))
            self._disk.sync_directory(partial)

    def try_commit(self, step: int, run: str, *, of: int) -> list[int]:
        if not self.partial(step, run).exists() and self._is_committed(step, run):
            return []
        with self.locked():
            if self._is_committed(step, run):
                return []
            parts = self._read_parts(step, run, of)
            missing = lacking(parts, of=of)
            if not missing:
                self._commit(join_parts(parts))
            return missing

    def are_coming(self, step: int, run: str, missing: Sequence[int], *, of: int) -> bool:
        partial = self.partial(step, run)
        return any(is_held(partial / shard_file_name(index, of)) for index in missing)

    def _commit(self, manifest: Manifest) -> None:
        partial = self.partial(manifest.step, manifest.run)
        target = self._directory / step_name(manifest.step)
        write_file(self._disk, partial / MANIFEST_FILE, seal(manifest))
        self._disk.sync_directory(partial)
        if target.exists():
            # Saved again, after a rollback for one: the old one stays until the new one is whole.
            self._disk.exchange(partial, target)
            self._disk.sync_directory(self._directory)
            self._disk.remove_tree(partial)
        else:
            self._disk.rename(partial, target)
            self._disk.sync_directory(self._directory)
        if len(manifest.parts) > 1:
            for part in manifest.parts:
                self._disk.remove(target / part_file_name(part.index))
        self._alone = None
        self._losses.pop(manifest.step, None)

    def _read_parts(self, step: int, run: str, of: int) -> list[PartRecord]:
        alone = self._alone
        if alone is not None and (alone.step, alone.run, of) == (step, run, 1):
            return [alone]
        parts = []
        for index in range(of):
            path = self.partial(step, run) / part_file_name(index)
            try:
                part = unseal_part(path.read_bytes())
            except (FileNotFoundError, BadDocument):
                continue
            if (part.step, part.run, part.of) == (step, run, of):
                parts.append(part)
        return parts

    def _is_committed(self, step: int, run: str) -> bool:
        manifest = read_manifest(self._directory / step_name(step))
        return isinstance(manifest, Manifest) and manifest.run == run

    def discard_part(self, step: int, run: str, index: int, *, of: int) -> None:
        with self.locked():
            partial = self.partial(step, run)
            self._disk.remove(partial / part_file_name(index))
            self._disk.remove(partial / shard_file_name(index, of))
            if not is_being_written(partial):
                self._disk.remove_tree(partial)

    def saved(self) -> list[Entry]:
        steps = steps_in(self._directory)
        for step in steps:
            if step not in self._losses:
                self._losses[step] = loss_of(read_manifest(self._directory / step_name(step)))
        return [Entry(step=step, loss=self._losses[step]) for step in steps]

    def remove(self, step: int) -> None:
        with self.locked():
            path = self._directory / step_name(step)
            if path.exists():
                # Out of sight first, so that nobody finds a checkpoint with half its files.
                hidden = f".{step_name(step)}.{uuid.uuid4().hex[:12]}.removed"
                self._disk.rename(path, self._directory / hidden)
                self._disk.sync_directory(self._directory)
        self._losses.pop(step, None)

    def sweep(self) -> None:
        for path in self._directory.glob(".step-*.removed"):
            if _REMOVED.fullmatch(path.name):
                self._disk.remove_tree(path)

    def clean(self) -> None:
        self._ensure()
        with self.locked():
            for path in partials_in(self._directory):
                if not is_being_written(path):
                    self._disk.remove_tree(path)
        self.sweep()

    def _ensure(self) -> None:
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._disk.sync_directory(self._directory.parent)

    @contextmanager
    def locked(self) -> Iterator[None]:
        fd = os.open(self._directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd, self._directory)
            yield
        finally:
            os.close(fd)


def _lock(fd: int, directory: Path) -> None:
    deadline_s = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise WaitTimedOut(
                    "lock", source=f"whoever holds {directory / '.lock'}", after_s=LOCK_WITHIN_S
                ) from None
            time.sleep(0.01)


def read_manifest(path: Path) -> Manifest | str:
    """The manifest of a checkpoint's directory, or why there is none."""
    try:
        return unseal_manifest((path / MANIFEST_FILE).read_bytes())
    except OSError as error:
        return f"{MANIFEST_FILE} cannot be read: {error.strerror}"
    except BadDocument as bad:
        return f"{MANIFEST_FILE} is damaged: {bad}"


def loss_of(manifest: Manifest | str) -> float | None:
    loss = None if isinstance(manifest, str) else manifest.about.get("loss")
    return float(loss) if isinstance(loss, int | float) else None
