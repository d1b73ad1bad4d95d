"""A disk that writes down what is done to it, and what may be left of that after a power cut.

The model is a strict one: data that was not synced may be there, in part, or not at all; a name
that was made, moved or removed is safe only after a sync of its directory, and until then each such
change may or may not have happened, whatever happened to the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from everstep.checkpoint.disk import Bytes, LocalDisk, OpenFile

Survives: TypeAlias = Callable[[], bool]
"""Asked about each change that was not synced."""


@dataclass(eq=False, slots=True)
class _File:
    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes, and cuts to a size (None)."""

    def content(self, survives: Survives) -> bytes:
        data = bytearray(self.synced)
        for at, written in self.pending:
            if not survives():
                continue
            if written is None:
                del data[at:]
                data.extend(bytes(at - len(data)))
            else:
                # A write that was cut off: its first half made it.
                kept = written if survives() else written[: len(written) // 2]
                data.extend(bytes(max(at + len(kept) - len(data), 0)))
                data[at : at + len(kept)] = kept
        return bytes(data)


@dataclass(eq=False, slots=True)
class _Directory:
    synced: dict[str, _Node] = field(default_factory=dict)
    entries: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def change(self, change: _Change) -> None:
        change(self.entries)
        self.pending.append(change)

    def left(self, survives: Survives) -> dict[str, _Node]:
        entries = dict(self.synced)
        for change in self.pending:
            if survives():
                change(entries)
        return entries


_Node: TypeAlias = _File | _Directory
_Change: TypeAlias = Callable[[dict[str, _Node]], None]
Operation: TypeAlias = Callable[[], None]


class RecordedDisk:
    """Does everything for real below `root`, and writes it down."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = LocalDisk()
        self.log: list[tuple[str, ...]] = []
        self.data: list[bytes] = []
        """What operation n wrote."""

    def note(self, *operation: str | Path, data: bytes = b"") -> None:
        self.log.append(tuple(map(str, operation)))
        self.data.append(data)

    def create(self, path: Path, *, is_direct: bool = False) -> OpenFile:
        self.note("create", path)
        return _RecordedFile(self._disk.create(path, is_direct=is_direct), path, self)

    def make_directory(self, path: Path) -> None:
        if not path.exists():
            self.note("make_directory", path)
        self._disk.make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self.note("sync_directory", path)

    def rename(self, source: Path, target: Path) -> None:
        self.note("rename", source, target)
        self._disk.rename(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        self.note("exchange", one, other)
        self._disk.exchange(one, other)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.note("remove", path)
        self._disk.remove(path)

    def remove_tree(self, path: Path) -> None:
        for below in sorted(path.iterdir()) if path.exists() else ():
            self.remove(below)
        if path.exists():
            self.note("remove", path)
        self._disk.remove_tree(path)


class _RecordedFile:
    def __init__(self, file: OpenFile, path: Path, disk: RecordedDisk) -> None:
        self._file = file
        self._path = path
        self._disk = disk

    def write(self, data: Bytes, *, at: int) -> None:
        self._disk.note("write", self._path, str(at), data=bytes(data))
        self._file.write(data, at=at)

    def resize(self, size_bytes: int) -> None:
        self._disk.note("resize", self._path, str(size_bytes))
        self._file.resize(size_bytes)

    def sync(self) -> None:
        self._disk.note("sync", self._path)

    def hold(self) -> None:
        self._file.hold()

    def close(self) -> None:
        self._file.close()


class Replay:
    """The first operations of a record, done to a model of a disk."""

    def __init__(self, disk: RecordedDisk, root: Path, *, num_operations: int) -> None:
        self._origin = root
        self._root = _Directory()
        for operation, data in zip(disk.log[:num_operations], disk.data, strict=False):
            self._do(operation, data)

    def _do(self, operation: Sequence[str], data: bytes) -> None:
        match operation:
            case ("create", path):
                self._link(path, _File())
            case ("make_directory", path):
                self._link(path, _Directory())
            case ("write", path, at):
                self._file(path).pending.append((int(at), data))
            case ("resize", path, size):
                self._file(path).pending.append((int(size), None))
            case ("sync", path):
                file = self._file(path)
                file.synced, file.pending = file.content(lambda: True), []
            case ("sync_directory", path):
                directory = self._directory(Path(path))
                directory.synced, directory.pending = dict(directory.entries), []
            case ("rename", source, target):
                self._change(source, _move(Path(source).name, Path(target).name))
            case ("exchange", one, other):
                self._change(one, _swap(Path(one).name, Path(other).name))
            case ("remove", path):
                self._change(path, _unlink(Path(path).name))
            case _:
                assert operation[0] == "told", operation

    def _directory(self, path: Path) -> _Directory:
        node: _Node = self._root
        for name in path.relative_to(self._origin).parts:
            assert isinstance(node, _Directory)
            node = node.entries[name]
        assert isinstance(node, _Directory)
        return node

    def _file(self, path: str) -> _File:
        node = self._directory(Path(path).parent).entries[Path(path).name]
        assert isinstance(node, _File)
        return node

    def _link(self, path: str, node: _Node) -> None:
        name = Path(path).name
        self._change(path, lambda entries: entries.__setitem__(name, node))

    def _change(self, path: str, change: _Change) -> None:
        self._directory(Path(path).parent).change(change)

    def write_to(self, target: Path, survives: Survives) -> None:
        """What a reader finds after the power is back."""
        _write(self._root, target, survives)


def _write(directory: _Directory, target: Path, survives: Survives) -> None:
    target.mkdir()
    for name, node in directory.left(survives).items():
        if isinstance(node, _File):
            (target / name).write_bytes(node.content(survives))
        else:
            _write(node, target / name, survives)


def _move(source: str, target: str) -> _Change:
    def change(entries: dict[str, _Node]) -> None:
        if source in entries:
            entries[target] = entries.pop(source)

    return change


def _swap(one: str, other: str) -> _Change:
    def change(entries: dict[str, _Node]) -> None:
        if one in entries and other in entries:
            entries[one], entries[other] = entries[other], entries[one]

    return change


def _unlink(name: str) -> _Change:
    def change(entries: dict[str, _Node]) -> None:
        entries.pop(name, None)

    return change


def fates(num_random: int, *, seed: int) -> Iterator[tuple[str, Survives]]:
    """Ways a power cut can treat what was not synced."""
    yield "nothing survives", lambda: False
    yield "everything survives", lambda: True
    for number in range(num_random):
        generator = random.Random(f"{seed}-{number}")
        share = generator.random()
        yield f"{share:.0%} survive ({number})", lambda g=generator, s=share: g.random() < s  # type: ignore[misc]
