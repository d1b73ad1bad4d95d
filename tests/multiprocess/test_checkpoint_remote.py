"""Checkpoints behind fsspec URLs."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.layout import Part
from everstep.checkpoint.remote_storage import RemoteFolder, staging_directory, whole_steps
from everstep.checkpoint.restore import load_newest, newest, wait_writers
from everstep.checkpoint.retention import KeepLast
from everstep.checkpoint.state import FlatState
from everstep.checkpoint.wire import Failed
from everstep.core.errors import CheckpointCorrupt, MissingExtra
from orders import OrderedWriter
from states import state_of, what_is_in

WAIT_S = 30.0
SETTINGS = EngineSettings(probe_bytes=0)
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _own_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its upload waits below the test's own directory, the writer's too."""
    staging = tmp_path / "staging"
    staging.mkdir()
    monkeypatch.setenv("TMPDIR", str(staging))
    monkeypatch.setattr(tempfile, "tempdir", str(staging))


@pytest.fixture
def memory_url() -> Iterator[str]:
    """fsspec's store in this process's memory: used by a writer in this process."""
    url = f"memory://everstep-{uuid.uuid4().hex}/ckpt"
    yield url
    files, root = fsspec.url_to_fs(url)
    if files.exists(root):
        files.rm(root, recursive=True)


def local_files(url: str) -> list[str]:
    return [name for name in os.listdir(staging_directory(url)) if name != ".lock"]


def test_a_checkpoint_goes_to_a_store_and_comes_back(memory_url: str) -> None:
    writer = OrderedWriter(memory_url)
    assert writer.save(1, state_of(1))
    assert writer.save(2, state_of(2))
    found = newest(memory_url)
    assert found is not None
    assert what_is_in(found) == (2, 0)
    assert local_files(memory_url) == []
    writer.remove(2)
    assert whole_steps(memory_url) == [1]


def test_without_its_manifest_nothing_is_there(memory_url: str) -> None:
    first, second = OrderedWriter(memory_url), OrderedWriter(memory_url)
    assert not first.save(1, state_of(1, prefix="0-"), index=0, of=2)
    assert whole_steps(memory_url) == []
    assert newest(memory_url) is None
    assert second.save(1, state_of(1, prefix="1-"), index=1, of=2)
    first.look_for_parts()
    assert local_files(memory_url) == []
    found = newest(memory_url)
    assert found is not None
    assert what_is_in(found) == (1, 0)
    names = {name.rsplit("/", 1)[-1] for name in _names(memory_url, 1)}
    assert names == {
        "manifest.json",
        "shard-00001-of-00002.safetensors",
        "shard-00002-of-00002.safetensors",
    }


def _names(url: str, step: int) -> list[str]:
    files, _ = fsspec.url_to_fs(url)
    listed: list[str] = files.ls(RemoteFolder(url).path(step), detail=False)
    return listed


def test_damage_in_the_store_is_found_and_passed_over(memory_url: str) -> None:
    writer = OrderedWriter(memory_url)
    for step in (1, 2):
        writer.save(step, state_of(step))
    files, _ = fsspec.url_to_fs(memory_url)
    for name in _names(memory_url, 2):
        data = files.cat_file(name)
        files.pipe_file(name, data[:-1] + bytes([data[-1] ^ 1]))
        loaded = load_newest(memory_url)
        assert loaded is not None
        assert what_is_in(loaded[0]) == (1, 0)
        assert [each.path.name for each in loaded[0].passed_over] == ["step-000000002"]
        files.pipe_file(name, data)


def test_parts_of_another_run_are_never_joined_in_a_store(memory_url: str) -> None:
    old, new = OrderedWriter(memory_url), OrderedWriter(memory_url)
    assert not old.save(1, state_of(1, salt=1, prefix="0-"), run="old", index=0, of=2)
    assert not new.save(1, state_of(1, salt=2, prefix="1-"), run="new", index=1, of=2)
    assert whole_steps(memory_url) == []


def test_a_step_saved_again_by_another_run_replaces_the_old_one(memory_url: str) -> None:
    assert OrderedWriter(memory_url).save(1, state_of(1, salt=1), run="old")
    assert OrderedWriter(memory_url).save(1, state_of(1, salt=2), run="new")
    found = newest(memory_url)
    assert found is not None
    assert what_is_in(found) == (1, 2)


def test_a_store_that_refuses_is_an_event_and_the_next_save_is_tried(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    url = f"file://{blocked}/ckpt"
    writer = OrderedWriter(url)
    assert not writer.save(1, state_of(1))
    (failed,) = (report for report in writer.reports if isinstance(report, Failed))
    assert "directory" in failed.why.lower() or "exists" in failed.why.lower()
    assert local_files(url) == []
    blocked.unlink()
    assert writer.save(2, state_of(2))


def test_the_engine_uploads_behind_and_keeps_what_it_should(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    with Engine(url, settings=SETTINGS, keep=KeepLast(2)) as engine:
        for step in range(4):
            assert engine.save(step, state_of(step))
            engine.wait(WAIT_S)
        assert [event["event"] for event in engine.poll()] == ["checkpoint"] * 4
    assert whole_steps(url) == [3, 2]
    assert wait_writers(url, timeout_s=0)
    found = newest(url)
    assert found is not None
    assert what_is_in(found) == (3, 0)


def test_ranks_with_no_common_disk_meet_in_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    engines = [Engine(url, part=Part(n, 2, run="r"), settings=SETTINGS) for n in range(2)]
    for number, engine in enumerate(engines):
        tensors = {f"rank-{number}": torch.full((5,), float(number))}
        assert engine.save(7, FlatState(tensors=tensors))
    for engine in engines:
        engine.wait(WAIT_S)
        assert [event["event"] for event in engine.poll()] == ["checkpoint"]
        engine.close()
    found = newest(url)
    assert found is not None
    assert {name: t.sum().item() for name, t in found.read().tensors.items()} == {
        "rank-0": 0.0,
        "rank-1": 5.0,
    }


def test_a_store_whose_library_is_missing_is_said_at_once() -> None:
    with pytest.raises(MissingExtra, match=r"everstep\[remote\]"):
        Engine("s3://bucket/ckpt", settings=SETTINGS)


def test_when_nothing_in_the_store_verifies_the_user_decides(memory_url: str) -> None:
    OrderedWriter(memory_url).save(1, state_of(1))
    RemoteFolder(memory_url).write(1, "manifest.json", b"{}")
    with pytest.raises(CheckpointCorrupt, match="none of its 1 checkpoints"):
        newest(memory_url)


def test_a_part_in_a_store_does_not_wait_for_ever_for_the_parts_of_the_dead(
    memory_url: str,
) -> None:
    """Whether others write cannot be seen in a store, and that was taken for yes: a writer whose
    trainer had died with the others' waited until the machine was switched off."""
    writer = OrderedWriter(memory_url, patience_s=0.3)
    assert not writer.save(1, state_of(1), run="r", index=0, of=2)
    writer.hurry()
    deadline_s = time.monotonic() + 20
    while not any(isinstance(report, Failed) for report in writer.reports):
        assert time.monotonic() < deadline_s, "it waits for ever"
        writer.look_for_parts()
        time.sleep(0.05)
