"""The engine with its real writer process."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from everstep.checkpoint.arena import Arena, Slot
from everstep.checkpoint.disk import LocalDisk
from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.checkpoint.layout import Box, Layout, Part, Slice
from everstep.checkpoint.restore import load_newest, newest, wait_writers
from everstep.checkpoint.retention import Entry, KeepLast
from everstep.checkpoint.state import FlatState, flatten, unflatten
from everstep.checkpoint.storage import LocalStorage
from everstep.checkpoint.wire import Remove, SlotFree, Wire
from everstep.checkpoint.writer import HURRIED_PATIENCE_S
from everstep.core.errors import NotInCheckpoint, WaitTimedOut
from everstep.testing.crashes import children_of, hear, started, wait_gone
from orders import OrderedWriter
from states import save_a_part, state_of, what_is_in
from trees import is_same

WAIT_S = 30.0
pytestmark = pytest.mark.timeout(60)
SETTINGS = EngineSettings(probe_bytes=1 << 20)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path / "ckpt", settings=SETTINGS) as engine:
        yield engine


def save_and_wait(engine: Engine, step: int, state: FlatState, **more: Any) -> dict[str, Any]:
    """What became of it."""
    assert engine.save(step, state, **more)
    engine.wait(WAIT_S)
    (event,) = engine.poll()
    return dict(event)


def awaited(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def names_in(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != ".lock")


def load_with_torch(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """By the stock reader, which warns that it works alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(tensors, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_model_and_its_optimizer_come_back_bit_for_bit(engine: Engine, tmp_path: Path) -> None:
    model, optimizer = trained()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "nothing": torch.empty(0, 3),
    }
    event = save_and_wait(engine, 7, flatten(tree), about={"loss": 1.5, "position": 28})
    assert event["event"] == "checkpoint"
    assert event["step"] == 7
    for name in ("stall_seconds", "durable_seconds", "bytes", "copy_ratio", "disk_ratio"):
        assert event[name] > 0, name
    loaded = load_newest(tmp_path / "ckpt")
    assert loaded is not None
    found, state = loaded
    assert found.manifest.about == {"loss": 1.5, "position": 28}
    assert is_same(unflatten(state), tree)
    assert names_in(tmp_path / "ckpt") == ["step-000000007"]
    assert engine.costs.num_saved == 1


def test_stock_tools_read_a_checkpoint(engine: Engine, tmp_path: Path) -> None:
    model, optimizer = trained()
    flat = flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    save_and_wait(engine, 0, flat)
    path = tmp_path / "ckpt" / "step-000000000"
    by_safetensors = safetensors.torch.load_file(path / "shard-00001-of-00001.safetensors")
    by_torch = {name: torch.zeros_like(tensor) for name, tensor in flat.tensors.items()}
    load_with_torch(by_torch, path)
    for name, tensor in flat.tensors.items():
        assert torch.equal(by_safetensors[name], tensor)
        assert torch.equal(by_torch[name], tensor)


def test_tensors_are_filled_in_place(engine: Engine, tmp_path: Path) -> None:
    save_and_wait(engine, 1, state_of(1))
    into = {name: torch.zeros_like(tensor) for name, tensor in state_of(1).tensors.items()}
    name, first = next(iter(into.items()))
    loaded = load_newest(tmp_path / "ckpt", into=into)
    assert loaded is not None
    assert loaded[1].tensors[name] is first
    assert bool((first == 1000).all())
    with pytest.raises(NotInCheckpoint, match=r"tensor to fill is torch\.int32"):
        loaded[0].read([name], into={name: first.int()})
    with pytest.raises(NotInCheckpoint, match="no tensor of that name"):
        loaded[0].read(["other"])


def test_unread_tensors_are_like_the_read_ones_but_for_their_values(
    engine: Engine, tmp_path: Path
) -> None:
    """For a reader that gets the bytes from another one."""
    save_and_wait(engine, 1, state_of(1))
    found = newest(tmp_path / "ckpt")
    assert found is not None
    whole = found.read()
    names = list(whole.tensors)
    into = {names[0]: torch.full_like(whole.tensors[names[0]], 7)}
    unread = found.unread(names, into=into)
    assert unread.plain == whole.plain
    assert unread.tensors[names[0]] is into[names[0]]
    assert bool((into[names[0]] == 7).all()), "nothing was read"
    for name, tensor in whole.tensors.items():
        assert unread.tensors[name].shape == tensor.shape
        assert unread.tensors[name].dtype == tensor.dtype


def test_a_state_larger_than_a_slot_goes_in_waves(tmp_path: Path) -> None:
    settings = EngineSettings(probe_bytes=0, max_slot_bytes=8192)
    state = FlatState(
        tensors={
            "long": torch.arange(20_000),
            "strided": torch.arange(6000).reshape(60, 100).t(),
            "empty": torch.empty(0),
            "bytes": torch.arange(256, dtype=torch.uint8),
        }
    )
    with Engine(tmp_path, settings=settings) as engine:
        assert save_and_wait(engine, 1, state)["event"] == "checkpoint"
    found = newest(tmp_path)
    assert found is not None
    for name, tensor in found.read().tensors.items():
        assert torch.equal(tensor, state.tensors[name])


def test_what_changes_after_before_update_is_not_in_the_checkpoint(
    engine: Engine, tmp_path: Path
) -> None:
    state = state_of(1, repeat=50)
    assert engine.save(1, state)
    engine.before_update()
    for tensor in state.tensors.values():
        tensor.add_(1)
    engine.wait(WAIT_S)
    found = newest(tmp_path / "ckpt")
    assert found is not None
    assert what_is_in(found) == (1, 0)


def test_volatile_tensors_may_change_at_once(engine: Engine, tmp_path: Path) -> None:
    running_mean = torch.zeros(100_000)
    state = flatten({"mean": running_mean, "w": torch.ones(3)}, volatile=["mean"])
    assert engine.save(1, state)
    running_mean.add_(1)
    engine.wait(WAIT_S)
    found = newest(tmp_path / "ckpt")
    assert found is not None
    assert not bool(found.read().tensors["mean"].any())


def test_a_save_is_skipped_and_said_while_both_slots_wait_for_a_slow_disk(
    engine: Engine, tmp_path: Path
) -> None:
    save_and_wait(engine, 0, state_of(0))
    pid = engine.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # A disk that takes no byte.
    try:
        assert [engine.save(step, state_of(step)) for step in (1, 2, 3)] == [True, True, False]
        engine.before_update()  # Training goes on all the same.
        with pytest.raises(WaitTimedOut, match="durable checkpoint of step 1, 2"):
            engine.wait(0.05)
        assert [(e["event"], e["step"]) for e in engine.poll()] == [("checkpoint_failed", 3)]
    finally:
        os.kill(pid, signal.SIGCONT)
    engine.wait(WAIT_S)
    assert [e["event"] for e in engine.poll()] == ["checkpoint", "checkpoint"]
    found = newest(tmp_path / "ckpt")
    assert found is not None
    assert what_is_in(found) == (2, 0)


WAVES = EngineSettings(probe_bytes=0, max_slot_bytes=8192, num_slots=1, wave_timeout_s=0.3)
"""Slots so small that a state takes several waves."""


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """A disk that takes nothing for a while."""
    pid = engine.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_copy_in_waves_gives_up_on_a_disk_that_takes_too_long_and_training_goes_on(
    tmp_path: Path,
) -> None:
    with Engine(tmp_path, settings=WAVES) as engine:
        save_and_wait(engine, 1, state_of(1))
        with stopped(engine):
            assert engine.save(2, state_of(2))
            engine.wait(WAIT_S)
            (event,) = engine.poll()
            assert "has not taken a wave within 0.3 s" in str(event["why"])
        assert save_and_wait(engine, 3, state_of(3), wait_s=WAIT_S)["event"] == "checkpoint"
    assert names_in(tmp_path) == ["step-000000001", "step-000000003"]


def test_a_state_that_changes_while_it_is_copied_is_never_written(tmp_path: Path) -> None:
    settings = replace(WAVES, wave_timeout_s=WAIT_S)
    with Engine(tmp_path, settings=settings) as engine:
        save_and_wait(engine, 1, state_of(1))
        state = state_of(2)
        with stopped(engine):
            assert engine.save(2, state)
            assert awaited(lambda: not engine._arena._free)
            for tensor in state.tensors.values():
                tensor.add_(1)  # before_update() was forgotten.
        engine.wait(WAIT_S)
        (event,) = engine.poll()
        assert "changed while it was copied: call before_update()" in str(event["why"])
        assert save_and_wait(engine, 3, state_of(3), wait_s=WAIT_S)["event"] == "checkpoint"
    assert names_in(tmp_path) == ["step-000000001", "step-000000003"]


def test_a_writer_killed_between_waves_fails_that_save_only(tmp_path: Path) -> None:
    settings = replace(WAVES, wave_timeout_s=WAIT_S)
    with Engine(tmp_path, settings=settings) as engine:
        save_and_wait(engine, 1, state_of(1))
        pid = engine.writer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert engine.save(2, state_of(2))
        os.kill(pid, signal.SIGKILL)
        engine.wait(WAIT_S)
        assert [event["event"] for event in engine.poll()] == ["checkpoint_failed"]
        assert save_and_wait(engine, 3, state_of(3), wait_s=WAIT_S)["event"] == "checkpoint"
    assert names_in(tmp_path) == ["step-000000001", "step-000000003"]


def test_a_state_that_grows_gets_a_larger_slot(engine: Engine, tmp_path: Path) -> None:
    """The optimizer's state is there only after its first step."""
    for step, repeat in ((1, 1), (2, 30), (3, 2)):
        event = save_and_wait(engine, step, state_of(step, repeat=repeat))
        assert event["event"] == "checkpoint"
        found = newest(tmp_path / "ckpt")
        assert found is not None
        assert what_is_in(found) == (step, 0)


def test_a_killed_writer_fails_its_saves_and_the_next_save_has_a_new_one(
    engine: Engine, tmp_path: Path
) -> None:
    save_and_wait(engine, 0, state_of(0))
    pid = engine.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert engine.save(1, state_of(1))
    engine.wait_handed_over(WAIT_S)
    os.kill(pid, signal.SIGKILL)
    engine.wait(WAIT_S)
    (event,) = engine.poll()
    assert event["event"] == "checkpoint_failed"
    assert "signal 9" in str(event["why"])
    assert save_and_wait(engine, 2, state_of(2))["event"] == "checkpoint"
    assert engine.writer_pid != pid
    assert names_in(tmp_path / "ckpt") == ["step-000000000", "step-000000002"]


def test_a_directory_that_cannot_be_made_is_an_event_until_it_can(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with Engine(blocked / "ckpt", settings=SETTINGS) as engine:
        event = save_and_wait(engine, 1, state_of(1))
        assert event["event"] == "checkpoint_failed"
        assert "Not a directory" in event["why"]
        blocked.unlink()
        assert save_and_wait(engine, 2, state_of(2))["event"] == "checkpoint"


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(
    engine: Engine, tmp_path: Path
) -> None:
    save_and_wait(engine, 0, state_of(0))
    pid = engine.writer_pid
    assert pid is not None
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    event = save_and_wait(engine, 1, state_of(1, repeat=20))
    assert event["event"] == "checkpoint_failed"
    assert "File too large" in event["why"]
    assert names_in(tmp_path / "ckpt") == ["step-000000000"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert save_and_wait(engine, 2, state_of(2, repeat=20))["event"] == "checkpoint"


def test_a_full_disk_is_an_event_and_what_was_there_stays(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root; the limit above covers the rest")
    try:
        with Engine(tmp_path / "ckpt", settings=EngineSettings(probe_bytes=0)) as engine:
            save_and_wait(engine, 0, state_of(0))
            event = save_and_wait(engine, 1, FlatState(tensors={"a": torch.zeros(2 << 20)}))
            assert event["event"] == "checkpoint_failed"
            assert "No space left" in event["why"]
            assert names_in(tmp_path / "ckpt") == ["step-000000000"]
            assert save_and_wait(engine, 2, state_of(2))["event"] == "checkpoint"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    for salt in (1, 2):
        with Engine(tmp_path, settings=SETTINGS) as engine:
            assert save_and_wait(engine, 5, state_of(5, salt=salt))["event"] == "checkpoint"
    found = newest(tmp_path)
    assert found is not None
    assert what_is_in(found) == (5, 2)
    assert names_in(tmp_path) == ["step-000000005"]


class _KeepLastTwo:
    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        return set(sorted(entry.step for entry in entries)[-2:])


class _KeepNothing:
    def keeps(self, entries: Sequence[Entry]) -> set[int]:
        assert all(entry.loss == entry.step / 10 for entry in entries)
        return set()


def test_retention_removes_what_it_does_not_keep(tmp_path: Path) -> None:
    with Engine(tmp_path, settings=SETTINGS, keep=_KeepLastTwo()) as engine:
        for step in range(5):
            save_and_wait(engine, step, state_of(step))
        assert awaited(lambda: names_in(tmp_path) == ["step-000000003", "step-000000004"])


def test_a_save_does_not_wait_until_an_old_one_is_freed(tmp_path: Path) -> None:
    """Where a file system took 0.3 s to free a gigabyte, the save after it began that much later:
    on disk at 0.6 of the disk's rate."""
    may_free = threading.Event()

    class SlowToFree(LocalDisk):
        def remove_tree(self, path: Path) -> None:
            assert may_free.wait(WAIT_S)
            super().remove_tree(path)

    orders = OrderedWriter(tmp_path, disk=SlowToFree())
    assert orders.save(1, state_of(1))
    orders._writer.obey(Remove(steps=(1,)), None)
    assert orders.save(2, state_of(2))
    hidden, *visible = names_in(tmp_path)
    assert hidden.endswith(".removed")
    assert visible == ["step-000000002"]
    may_free.set()
    orders._writer.wait_swept()
    assert names_in(tmp_path) == ["step-000000002"]


def test_a_writer_that_was_started_listens_when_memory_is_made(tmp_path: Path) -> None:
    """A trainer that was killed right after its start left a writer that had not looked at its
    first order yet: the next trainer saw no writer, waited for none, and began anew."""
    with Engine(tmp_path, settings=SETTINGS) as engine:
        engine.start_writer()
        engine.prepare(state_of(1))
        assert engine.costs.disk_bytes_per_s > 0, "it has not said that it is ready"


def test_memory_that_is_made_on_a_thread_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement made the memory for its copies after its first step, 1.5 s for 256 MB, and all
    stages waited for it. Now that is done on a thread; a save that comes before takes the other
    slot."""
    is_begun, may_go_on = threading.Event(), threading.Event()
    make = Arena.memory

    def make_slowly(arena: Arena, number: int, **wanted: Any) -> Slot:
        if number == 0 and not is_begun.is_set():
            is_begun.set()
            assert may_go_on.wait(WAIT_S)
        return make(arena, number, **wanted)

    monkeypatch.setattr(Arena, "memory", make_slowly)
    with Engine(tmp_path, settings=SETTINGS) as engine:
        engine.prepare(state_of(1), is_awaited=False)
        assert is_begun.wait(WAIT_S)
        save_and_wait(engine, 1, state_of(1))
        may_go_on.set()
        save_and_wait(engine, 2, state_of(2))
    assert names_in(tmp_path) == ["step-000000001", "step-000000002"]


def test_saves_that_end_while_the_engine_is_closed_are_told_and_kept_as_asked(
    tmp_path: Path,
) -> None:
    """The first of two saves ended when the writer had been told that no more orders would come.
    The order to remove an older one broke the connection: the second was told to have failed."""
    with Engine(tmp_path, settings=SETTINGS, keep=KeepLast(1)) as engine:
        save_and_wait(engine, 0, state_of(0))
        for step in (1, 2):
            assert engine.save(step, state_of(step, scale=100), wait_s=WAIT_S)
    assert [(event["event"], event["step"]) for event in engine.poll()] == [
        ("checkpoint", 1),
        ("checkpoint", 2),
    ]
    assert names_in(tmp_path) == ["step-000000002"]


def test_what_is_sent_after_the_end_does_not_stop_what_comes() -> None:
    ours, theirs = map(Wire, socket.socketpair())
    ours.finish()
    with pytest.raises(OSError, match="nothing more"):
        ours.send(Remove(steps=(1,)))
    theirs.send(SlotFree(slot=3))
    assert ours.receive_report() == SlotFree(slot=3)
    ours.close()
    theirs.close()


def test_retention_never_removes_the_newest(tmp_path: Path) -> None:
    with Engine(tmp_path, settings=SETTINGS, keep=_KeepNothing()) as engine:
        for step in range(3):
            save_and_wait(engine, step, state_of(step), about={"loss": step / 10})
    assert names_in(tmp_path) == ["step-000000002"]


def test_what_a_dead_writer_left_is_removed_and_what_a_live_one_writes_is_not(
    tmp_path: Path,
) -> None:
    left = tmp_path / ".step-000000009.dead.partial"
    left.mkdir(parents=True)
    (left / "shard-00001-of-00001.safetensors").write_bytes(b"half")
    with Engine(tmp_path, part=Part(0, 2, run="live"), settings=SETTINGS) as waiting:
        assert waiting.save(3, state_of(3))
        assert awaited(lambda: names_in(tmp_path) == [".step-000000003.live.partial"])
        with Engine(tmp_path, settings=SETTINGS) as other:
            save_and_wait(other, 1, state_of(1))
        assert names_in(tmp_path) == [".step-000000003.live.partial", "step-000000001"]
        assert not wait_writers(tmp_path, timeout_s=0.1)
        with Engine(tmp_path, part=Part(1, 2, run="live"), settings=SETTINGS) as last:
            save_and_wait(last, 3, FlatState(tensors={"more": torch.ones(2)}))
        waiting.wait(WAIT_S)
        assert wait_writers(tmp_path, timeout_s=0.1)
    assert names_in(tmp_path) == ["step-000000001", "step-000000003"]


def test_parts_that_do_not_come_are_named_when_patience_ends(tmp_path: Path) -> None:
    settings = EngineSettings(probe_bytes=0, patience_s=0.1)
    with Engine(tmp_path, part=Part(1, 3, run="r"), settings=settings) as engine:
        event = save_and_wait(engine, 1, state_of(1))
    assert event["event"] == "checkpoint_failed"
    assert "parts 0, 2 of 3" in event["why"]
    assert names_in(tmp_path) == []


def test_a_part_whose_trainer_died_waits_only_for_parts_that_are_being_written(
    tmp_path: Path,
) -> None:
    """Two trainers were killed, one before it had begun its part of the checkpoint. The other's
    writer waited ten minutes for it; the next start waited a minute for that writer."""
    with started(save_a_part, tmp_path) as (trainer, pipe):
        hear(pipe)
        (writer,) = children_of(trainer)
        trainer.kill()
        wait_gone(writer)
    assert names_in(tmp_path) == []


def test_a_part_whose_trainer_died_waits_for_a_part_that_is_being_written(tmp_path: Path) -> None:
    with started(save_a_part, tmp_path) as (trainer, pipe):
        hear(pipe)
        (writer,) = children_of(trainer)
        slow = LocalStorage(tmp_path).open_part(1, "r", 1, of=2)
        trainer.kill()
        time.sleep(HURRIED_PATIENCE_S + 0.5)
        slow.close()
        assert OrderedWriter(tmp_path).save(1, state_of(1, prefix="b"), run="r", index=1, of=2)
        wait_gone(writer)
    assert names_in(tmp_path) == ["step-000000001"]


def test_saves_of_a_run_that_is_over_wait_only_for_parts_that_are_being_written(
    tmp_path: Path,
) -> None:
    with Engine(tmp_path, part=Part(0, 2, run="old"), settings=SETTINGS) as engine:
        assert engine.save(1, state_of(1))
        assert engine.save(2, state_of(2))
        assert awaited(lambda: len(names_in(tmp_path)) == 2)
        slow = LocalStorage(tmp_path).open_part(2, "old", 1, of=2)
        engine.hurry("new")
        assert awaited(lambda: names_in(tmp_path) == [".step-000000002.old.partial"])
        assert engine.save(3, state_of(3), run="new", wait_s=WAIT_S)
        slow.close()
        writer = OrderedWriter(tmp_path)
        assert writer.save(2, state_of(2, prefix="b"), run="old", index=1, of=2)
        time.sleep(HURRIED_PATIENCE_S + 0.5)  # That of the new run is still waited for.
        assert writer.save(3, state_of(3, prefix="b"), run="new", index=1, of=2)
        engine.wait(WAIT_S)
        ends = [(event["event"], event["step"]) for event in engine.poll()]
    assert ends == [("checkpoint_failed", 1), ("checkpoint", 2), ("checkpoint", 3)]
    assert names_in(tmp_path) == ["step-000000002", "step-000000003"]


def test_two_replicas_of_two_stages_are_read_by_one_replica_of_three(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = {f"model/layers.{n}.weight": torch.randn(5, 4) for n in range(6)}
    names = sorted(whole)
    stages = [names[:3], names[3:]]
    engines = []
    for replica in range(2):
        for stage in range(2):
            index = 2 * replica + stage
            part = Part(index, 4, run="gen-1")
            engine = Engine(tmp_path, part=part, settings=EngineSettings(probe_bytes=0))
            engines.append(engine)
            own = {f"workers/{index}/random": torch.tensor([index])}
            tree = {"tensors": {name: whole[name] for name in stages[stage]}, **own}
            layout = Layout(copies=(stage, 2 + stage), private=frozenset(own))
            tensors = {name: whole[name] for name in stages[stage]} | own
            state = FlatState(tensors=tensors, plain=flatten(tree).plain)
            assert engine.save(10, state, layout=layout, about={"position": 40})
    for engine in engines:
        engine.wait(WAIT_S)
        assert [event["event"] for event in engine.poll()] == ["checkpoint"]
        engine.close()
    found = newest(tmp_path)
    assert found is not None
    written = [record.name for part in found.manifest.parts for record in part.tensors]
    assert sorted(written) == sorted([*whole, *(f"workers/{n}/random" for n in range(4))])
    for stage in range(3):
        mine = names[2 * stage : 2 * stage + 2]
        read = found.read(mine).tensors
        assert all(torch.equal(read[name], whole[name]) for name in mine)
    assert torch.equal(
        found.read(["workers/3/random"]).tensors["workers/3/random"][0], torch.tensor(3)
    )
    by_torch = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    load_with_torch(by_torch, found.path)
    assert all(torch.equal(by_torch[name], whole[name]) for name in whole)


def test_slices_of_a_tensor_are_read_in_another_cut_also_by_torch(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    cuts = [(0, 3), (3, 10)]
    engines = [Engine(tmp_path, part=Part(n, 2, run="r"), settings=SETTINGS) for n in range(2)]
    for engine, (low, high) in zip(engines, cuts, strict=True):
        layout = Layout(slices={"w": Slice(offsets=(low, 0), whole=(10, 6))})
        assert engine.save(1, FlatState(tensors={"w": whole[low:high].clone()}), layout=layout)
    for engine in engines:
        engine.wait(WAIT_S)
        engine.close()
    found = newest(tmp_path)
    assert found is not None
    assert torch.equal(found.read().tensors["w"], whole)
    for box in (Box((2, 1), (4, 5)), Box((3, 0), (7, 6)), Box((0, 0), (1, 1))):
        assert torch.equal(found.read(boxes={"w": box}).tensors["w"], whole[box.slices()])
    strided = torch.zeros(6, 10).t()
    found.read(into={"w": strided})
    assert torch.equal(strided, whole)
    by_torch = {"w": torch.zeros(10, 6)}
    load_with_torch(by_torch, found.path)
    assert torch.equal(by_torch["w"], whole)


def test_the_writer_loads_no_torch(engine: Engine) -> None:
    save_and_wait(engine, 1, state_of(1))
    maps = Path(f"/proc/{engine.writer_pid}/maps").read_text()
    assert "msgspec" in maps
    assert "torch" not in maps


def test_closing_leaves_no_process_behind(tmp_path: Path) -> None:
    with Engine(tmp_path, settings=SETTINGS) as engine:
        assert engine.save(1, state_of(1))
        engine.wait_handed_over(WAIT_S)
        pid = engine.writer_pid
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()
    assert names_in(tmp_path) == ["step-000000001"]
