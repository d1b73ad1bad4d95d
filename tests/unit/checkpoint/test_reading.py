"""Reading of blocks: from memory what is there, from the disk the rest, and that once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_64

from everstep.checkpoint.cached_pages import CachedPages
from everstep.checkpoint.reading import Block, read_blocks

MB = 1 << 20


def written(path: Path, num_bytes: int) -> bytes:
    """On disk, and no longer in memory where the file system can forget."""
    data = os.urandom(num_bytes)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(fd, data)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return data


def read_from_disk_bytes() -> int:
    """By this process, since it began."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def test_what_is_not_in_memory_is_read_from_the_disk_once(tmp_path: Path) -> None:
    """A restore asked the page cache by reads that must not wait; each miss started read-ahead,
    and then the block was read around the cache as well: 1.4 GB for each gigabyte, in twice the
    time. Now the kernel is asked what it holds."""
    path, size, num_blocks = tmp_path / "shard", 8 * MB, 16
    data = written(path, size * num_blocks)
    target = torch.empty(len(data), dtype=torch.uint8)
    blocks = [
        Block(
            path=path,
            start=start,
            size_bytes=size,
            checksum=xxh3_64(data[start : start + size]).hexdigest(),
            what="a block",
            target=target[start : start + size],
        )
        for start in range(0, len(data), size)
    ]
    before = read_from_disk_bytes()
    assert not read_blocks(blocks)
    assert read_from_disk_bytes() - before < 1.1 * len(data)
    assert target.numpy().tobytes() == data


@pytest.mark.parametrize("size", [1, 4096, 5 * 4096 + 1])
def test_a_file_that_was_just_read_is_held(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    written(path, size)
    path.read_bytes()
    with path.open("rb") as file:
        pages = CachedPages(file.fileno())
        assert all(pages.hold(at) for at in (0, size // 2, size - 1))
        assert pages.hold(size), "beyond the end there is nothing to read"
        pages.close()


def test_an_empty_file_is_held(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as file:
        pages = CachedPages(file.fileno())
        assert pages.hold(0)
        pages.close()


def test_forgotten_pages_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written(path, 16 * MB)
    with path.open("rb") as file:
        pages = CachedPages(file.fileno())
        is_held = pages.hold(8 * MB)
        pages.close()
    if is_held and not _forgets(path):
        pytest.skip("this file system keeps its files in memory")
    assert not is_held


def _forgets(path: Path) -> bool:
    """Whether the file is on a disk: a memory file system has none to read from."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    folders = [(len(at), kind) for _, at, kind, *_ in mounts if path.is_relative_to(at)]
    return max(folders)[1] != "tmpfs"
