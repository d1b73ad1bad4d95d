"""No damage to any file of a checkpoint passes: it is refused, and the one before is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.restore import Found, load_newest, look_at, newest
from everstep.core.errors import CheckpointCorrupt
from orders import OrderedWriter
from states import state_of, what_is_in


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("flips")
    parts = [OrderedWriter(path), OrderedWriter(path)]
    for step in (1, 2):
        for index, writer in enumerate(parts):
            writer.save(step, state_of(step, prefix=f"{index}-"), index=index, of=2)
    return path


@pytest.fixture
def newest_files(directory: Path) -> Iterator[dict[Path, bytes]]:
    """The files of the newest checkpoint, put back afterwards."""
    files = {path: path.read_bytes() for path in sorted((directory / "step-000000002").iterdir())}
    assert [path.name for path in files] == [
        "manifest.json",
        "shard-00001-of-00002.safetensors",
        "shard-00002-of-00002.safetensors",
    ]
    yield files
    for path, data in files.items():
        path.write_bytes(data)


def falls_back(directory: Path) -> None:
    found = newest(directory)
    loaded = load_newest(directory)
    assert found is not None
    assert loaded is not None
    assert what_is_in(found) == (1, 0)
    assert [each.path.name for each in found.passed_over] == ["step-000000002"]
    assert loaded[0].path == found.path


@given(st.data())
def test_any_flipped_bit_of_any_file_is_refused(directory: Path, data: st.DataObject) -> None:
    files = sorted((directory / "step-000000002").iterdir())
    path = data.draw(st.sampled_from(files))
    original = path.read_bytes()
    position = data.draw(st.integers(0, 8 * len(original) - 1))
    flipped = bytearray(original)
    flipped[position // 8] ^= 1 << position % 8
    path.write_bytes(flipped)
    try:
        falls_back(directory)
    finally:
        path.write_bytes(original)


def test_every_file_that_is_cut_grown_or_gone_is_refused(
    directory: Path, newest_files: dict[Path, bytes]
) -> None:
    for path, data in newest_files.items():
        for damaged in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            path.write_bytes(damaged)
            falls_back(directory)
        path.unlink()
        falls_back(directory)
        path.write_bytes(data)


def test_files_of_another_step_are_refused(
    directory: Path, newest_files: dict[Path, bytes]
) -> None:
    """As when an overwrite is killed half-way: a mix of old and new."""
    for path, data in newest_files.items():
        path.write_bytes((directory / "step-000000001" / path.name).read_bytes())
        falls_back(directory)
        path.write_bytes(data)


def test_when_nothing_verifies_the_user_decides(
    directory: Path, newest_files: dict[Path, bytes]
) -> None:
    for path, data in newest_files.items():
        other = directory / "step-000000001" / path.name
        kept = other.read_bytes()
        other.write_bytes(kept[:-1])
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointCorrupt, match="none of its 2 checkpoints verifies"):
            newest(directory)
        other.write_bytes(kept)
        path.write_bytes(data)


def test_what_is_read_is_checked_even_when_it_was_not_verified_before(
    directory: Path, newest_files: dict[Path, bytes]
) -> None:
    found = look_at(directory / "step-000000002")
    assert isinstance(found, Found)
    path = list(newest_files)[-1]
    path.write_bytes(newest_files[path][:-1] + b"\x07")
    with pytest.raises(CheckpointCorrupt, match="does not match"):
        found.read()


def test_an_empty_or_missing_directory_holds_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
