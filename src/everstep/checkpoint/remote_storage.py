"""Checkpoints at any fsspec URL: written locally, uploaded behind, the manifest last.

    URL/step-000000042/shard-... part-...     uploaded by each rank, in any order
    URL/step-000000042/manifest.json          by whoever finds all parts: only now it exists

Object stores have no rename, so the manifest is what makes a checkpoint, and goes first when one is
removed or saved again. What is local is only on its way. Reading brings a checkpoint here and
verifies it here. Needs fsspec (`everstep[remote]`), and the library of the store in question.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from everstep.checkpoint.disk import Disk, OpenFile
from everstep.checkpoint.manifest import (
    MANIFEST_FILE,
    BadDocument,
    Manifest,
    PartRecord,
    join_parts,
    lacking,
    part_file_name,
    seal,
    unseal_manifest,
    unseal_part,
)
from everstep.checkpoint.retention import Entry
from everstep.checkpoint.storage import LocalStorage, loss_of, step_name
from everstep.core.errors import MissingExtra

_STEP = re.compile(r"step-(\d{9,})")


def is_url(directory: str | Path) -> bool:
    return "://" in str(directory)


def staging_directory(url: str) -> Path:
    """Where shards wait for their upload: one place per URL."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"everstep-staging-{os.getuid()}" / name


class RemoteFailed(OSError):
    """Whatever a store raised; its text says what."""


@contextmanager
def _as_trouble() -> Iterator[None]:
    """Stores raise errors of their own libraries: to a save they are all the same trouble."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise RemoteFailed(f"{type(error).__name__}: {error}") from error


class RemoteFolder:
    """A folder of checkpoints behind a URL, as far as reading and removing goes."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise MissingExtra("fsspec", extra="remote", needed_for=f"a store at {url}") from None
        try:
            files, self._root = fsspec.url_to_fs(url)
        except ImportError as error:
            name = error.name or str(error)
            raise MissingExtra(name, extra="remote", needed_for=f"a store at {url}") from None
        self._files: Any = files

    def path(self, step: int, name: str = "") -> str:
        folder = f"{self._root.rstrip('/')}/{step_name(step)}"
        return f"{folder}/{name}" if name else folder

    def steps(self) -> list[int]:
        """Those that have a folder, newest first."""
        with _as_trouble():
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)
        return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)

    def read(self, step: int, name: str) -> bytes | None:
        with _as_trouble():
            try:
                data: bytes = self._files.cat_file(self.path(step, name))
            except FileNotFoundError:
                return None
            return data

    def write(self, step: int, name: str, data: bytes) -> None:
        with _as_trouble():
            self._files.makedirs(self.path(step), exist_ok=True)
            self._files.pipe_file(self.path(step, name), data)

    def upload(self, step: int, path: Path) -> None:
        with _as_trouble():
            self._files.makedirs(self.path(step), exist_ok=True)
            self._files.put_file(str(path), self.path(step, path.name))

    def download(self, step: int, name: str, target: Path) -> None:
        with _as_trouble():
            self._files.get_file(self.path(step, name), str(target))

    def manifest(self, step: int) -> Manifest | None:
        data = self.read(step, MANIFEST_FILE)
        try:
            return None if data is None else unseal_manifest(data)
        except BadDocument:
            return None

    def remove(self, step: int, name: str = "") -> None:
        with _as_trouble(), suppress(FileNotFoundError):
            self._files.rm(self.path(step, name), recursive=not name)


class RemoteStorage:
    """What a writer needs, with a URL behind it."""

    def __init__(self, url: str, *, disk: Disk | None = None) -> None:
        self._folder = RemoteFolder(url)
        staging = staging_directory(url)
        staging.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._local = LocalStorage(staging, disk=disk)
        self._records: dict[tuple[int, str], PartRecord] = {}
        """Uploaded by this writer; the checkpoint is not complete yet."""

    @property
    def directory(self) -> Path:
        return self._local.directory

    def open_part(self, step: int, run: str, index: int, *, of: int) -> OpenFile:
        return self._local.open_part(step, run, index, of=of)

    def add_part(self, record: PartRecord) -> None:
        step, run = record.step, record.run
        known = self._folder.manifest(step)
        if known is not None and known.run != run:
            # Its files are about to be replaced: it must not be taken for whole meanwhile.
            self._folder.remove(step, MANIFEST_FILE)
        self._folder.upload(step, self._local.partial(step, run) / record.file)
        self._folder.write(step, part_file_name(record.index), seal(record))
        self._records[step, run] = record

    def try_commit(self, step: int, run: str, *, of: int) -> list[int]:
        known = self._folder.manifest(step)
        if known is None or known.run != run:
            parts = self._parts(step, run, of)
            missing = lacking(parts, of=of)
            if missing:
                return missing
            self._folder.write(step, MANIFEST_FILE, seal(join_parts(parts)))
        record = self._records.pop((step, run))
        self._local.discard_part(step, run, record.index, of=of)
        self._folder.remove(step, part_file_name(record.index))
        return []

    def are_coming(self, step: int, run: str, missing: Sequence[int], *, of: int) -> None:
        """Another machine's writers cannot be seen from here."""

    def _parts(self, step: int, run: str, of: int) -> list[PartRecord]:
        parts = []
        for index in range(of):
            data = self._folder.read(step, part_file_name(index))
            try:
                part = None if data is None else unseal_part(data)
            except BadDocument:
                continue
            if part is not None and (part.step, part.run, part.of) == (step, run, of):
                parts.append(part)
        return parts

    def discard_part(self, step: int, run: str, index: int, *, of: int) -> None:
        self._records.pop((step, run), None)
        self._local.discard_part(step, run, index, of=of)
        self._folder.remove(step, part_file_name(index))

    def saved(self) -> list[Entry]:
        """Those that have a manifest."""
        entries = []
        for step in self._folder.steps():
            manifest = self._folder.manifest(step)
            if manifest is not None:
                entries.append(Entry(step=step, loss=loss_of(manifest)))
        return entries

    def remove(self, step: int) -> None:
        self._folder.remove(step, MANIFEST_FILE)
        self._folder.remove(step)

    def sweep(self) -> None:
        """Nothing is left: a store has no other place to move files to, so they went at once."""

    def clean(self) -> None:
        self._local.clean()


def whole_steps(url: str) -> list[int]:
    """The steps that have a manifest, newest first: a folder without one is still on its way."""
    folder = RemoteFolder(url)
    return [step for step in folder.steps() if folder.read(step, MANIFEST_FILE) is not None]


def fetch_step(url: str, step: int) -> Path:
    """Brings a checkpoint to a directory of this process's own, which goes with it.

    Nothing is verified: that is the reader's part.
    """
    folder = RemoteFolder(url)
    target = _fetched_directory() / step_name(step)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    data = folder.read(step, MANIFEST_FILE)
    if data is not None:
        (target / MANIFEST_FILE).write_bytes(data)
    manifest = folder.manifest(step)
    for part in manifest.parts if manifest else ():
        with suppress(FileNotFoundError):
            folder.download(step, part.file, target / part.file)
    return target


@cache
def _fetched_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="everstep-fetched-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
