"""Every moment at which the power can go: the last checkpoint is left, or the next, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.checkpoint.restore import newest
from orders import OrderedWriter
from recorded_disk import RecordedDisk, Replay, fates
from states import state_of, what_is_in

NUM_RANDOM = 6


class _Story:
    """Saves, written down with the moments at which each was told to be durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.disk = RecordedDisk(root)
        self._writers: dict[int, OrderedWriter] = {}

    def save(self, step: int, *, salt: int, run: str, index: int = 0, of: int = 1) -> None:
        if index not in self._writers:
            self._writers[index] = OrderedWriter(self.root, disk=self.disk)
        state = state_of(step, salt=salt)
        if self._writers[index].save(step, state, run=run, index=index, of=of):
            self.disk.note("told", str(step), str(salt))

    def remove(self, step: int) -> None:
        self._writers[0].remove(step)

    def check_every_moment(self, tmp_path: Path) -> int:
        """The checkpoints told to be durable are there after any power cut, unmixed."""
        num_cuts = 0
        told: list[tuple[int, int]] = []
        for num_operations in range(len(self.disk.log) + 1):
            if num_operations and self.disk.log[num_operations - 1][0] == "told":
                _, step, salt = self.disk.log[num_operations - 1]
                told.append((int(step), int(salt)))
            replay = Replay(self.disk, self.root, num_operations=num_operations)
            for fate, survives in fates(NUM_RANDOM, seed=num_operations):
                num_cuts += 1
                target = tmp_path / f"cut-{num_cuts}"
                replay.write_to(target, survives)
                where = f"after {num_operations} operations, {fate}"
                self._check(target, told, self._next_told(num_operations), where)
        return num_cuts

    def _next_told(self, num_operations: int) -> tuple[int, int] | None:
        coming = (entry for entry in self.disk.log[num_operations:] if entry[0] == "told")
        following = next(coming, None)
        return None if following is None else (int(following[1]), int(following[2]))

    def _check(
        self,
        directory: Path,
        told: list[tuple[int, int]],
        following: tuple[int, int] | None,
        where: str,
    ) -> None:
        found = newest(directory)
        if found is None:
            assert not told, f"{told[-1]} is lost {where}"
            return
        assert not found.passed_over, f"a broken checkpoint is visible {where}: {found.passed_over}"
        held = what_is_in(found)
        assert held in [*told[-1:], following], f"{held} {where}: told were {told}"


@pytest.mark.timeout(120)
def test_a_power_cut_at_any_moment_leaves_the_last_checkpoint_or_the_next(tmp_path: Path) -> None:
    story = _Story(tmp_path / "origin")
    story.save(1, salt=1, run="a")
    story.save(2, salt=1, run="a")
    story.remove(1)
    story.save(2, salt=2, run="b")  # Saved again after a rollback: replaces the other.
    story.save(3, salt=3, run="b")
    assert story.check_every_moment(tmp_path) > 300


@pytest.mark.timeout(120)
def test_a_power_cut_never_leaves_a_checkpoint_with_some_of_its_parts(tmp_path: Path) -> None:
    story = _Story(tmp_path / "origin")
    for step, run in ((1, "a"), (2, "a"), (2, "b")):
        for index in (1, 0, 2):
            story.save(step, salt=0, run=run, index=index, of=3)
    assert story.check_every_moment(tmp_path) > 300


def test_the_model_finds_a_writer_that_does_not_sync(tmp_path: Path) -> None:
    """The check can fail: without the syncs of files, data is lost that was told to be durable."""
    story = _Story(tmp_path / "origin")
    story.save(1, salt=1, run="a")
    kept = [n for n, entry in enumerate(story.disk.log) if entry[0] != "sync"]
    story.disk.log = [story.disk.log[n] for n in kept]
    story.disk.data = [story.disk.data[n] for n in kept]
    with pytest.raises(Exception, match=r"none of its 1 checkpoints verifies|is lost"):
        story.check_every_moment(tmp_path)


@pytest.mark.parametrize("forgotten", ["rename", "manifest"])
def test_the_model_finds_a_forgotten_sync_of_a_directory(tmp_path: Path, forgotten: str) -> None:
    story = _Story(tmp_path / "origin")
    story.save(1, salt=1, run="a")
    syncs = [n for n, entry in enumerate(story.disk.log) if entry[0] == "sync_directory"]
    dropped = syncs[-1] if forgotten == "rename" else syncs[-2]
    del story.disk.log[dropped], story.disk.data[dropped]
    with pytest.raises(Exception, match=r"none of its 1 checkpoints verifies|is lost"):
        story.check_every_moment(tmp_path)
