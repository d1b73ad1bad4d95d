"""Parts of one checkpoint that are finished at the same moment."""

from __future__ import annotations

import threading
from pathlib import Path

from everstep.checkpoint.disk import LocalDisk
from everstep.checkpoint.manifest import FORMAT, PartRecord, shard_file_name
from everstep.checkpoint.storage import LocalStorage

STEP, RUN = 3, "run"


def record(index: int) -> PartRecord:
    return PartRecord(
        format=FORMAT,
        step=STEP,
        run=RUN,
        index=index,
        of=2,
        file=shard_file_name(index, 2),
        file_bytes=0,
        head_bytes=0,
        head_checksum="",
        tensors=(),
        plain=None,
        about={},
    )


class InterruptedDisk(LocalDisk):
    """Lets another writer look for parts whenever a directory is about to be synced."""

    def __init__(self, other: LocalStorage) -> None:
        self._other = other
        self.looking: list[threading.Thread] = []

    def sync_directory(self, path: Path) -> None:
        if path.name.endswith(".partial"):
            look = threading.Thread(
                target=self._other.try_commit, args=(STEP, RUN), kwargs={"of": 2}
            )
            look.start()
            look.join(0.3)
            self.looking.append(look)
        super().sync_directory(path)


def test_a_part_is_recorded_before_anybody_can_commit_it(tmp_path: Path) -> None:
    # One wrote its record, the other found all records there and renamed the directory, and then
    # the first could not sync the directory that its record was in: it told of a failure although
    # the checkpoint was on disk. Seen in the first live run with two stages.
    other = LocalStorage(tmp_path)
    disk = InterruptedDisk(other)
    mine = LocalStorage(tmp_path, disk=disk)
    for index, storage in enumerate((other, mine)):
        storage.open_part(STEP, RUN, index, of=2).close()
    other.add_part(record(0))
    mine.add_part(record(1))
    for look in disk.looking:
        look.join()
    assert mine.try_commit(STEP, RUN, of=2) == []
    assert [entry.step for entry in mine.saved()] == [STEP]
