"""A trainer for crash tests: saves step after step until it is killed, and tells what is durable.

A module of its own, because a process started by forkserver must be able to import its target.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from everstep.checkpoint.engine import Engine, EngineSettings, Event
from everstep.checkpoint.layout import Part
from everstep.checkpoint.restore import newest, wait_writers
from states import state_of, what_is_in

WAIT_S = 30.0
SETTINGS = EngineSettings(probe_bytes=0)


class Victim(StrEnum):
    TRAINER = "trainer"
    WRITER = "writer"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    victim: Victim
    after_s: float
    """From the trainer's first durable save on."""


def kills(num: int, *, seed: int, within_s: float) -> Iterator[Kill]:
    generator = random.Random(seed)
    for _ in range(num):
        victim = generator.choice(list(Victim))
        yield Kill(victim=victim, after_s=generator.uniform(0, within_s))


def train(pipe: Connection, directory: Path, first_step: int, scale: int) -> None:
    """Saves for ever. Says the first step, its writer's pid, then each step that became durable."""
    torch.set_num_threads(1)

    def heard(event: Event) -> None:
        if event["event"] == "checkpoint":
            pipe.send(event["step"])

    engine = Engine(directory, part=Part(0, 1), settings=SETTINGS, on_event=heard)
    step = first_step
    engine.save(step, state_of(step, scale=scale))
    engine.wait(WAIT_S)
    pipe.send(engine.writer_pid)  # Now: it takes a while to start, and that is no save.
    while True:
        step += 1
        state = state_of(step, scale=scale)
        while not engine.save(step, state):
            time.sleep(0.001)
        engine.before_update()
        for tensor in state.tensors.values():
            tensor.fill_(-1.0)  # A copy that still reads the tensors shows.


def save_and_die(pipe: Connection, directory: Path) -> None:
    """Dies by SIGKILL as soon as the writer has it all; the writer has not written a byte yet."""
    engine = Engine(directory, settings=SETTINGS)
    engine.prepare(1 << 20)
    writer_pid = engine.writer_pid
    assert writer_pid is not None
    os.kill(writer_pid, signal.SIGSTOP)
    engine.save(1, state_of(1))
    engine.wait_handed_over(WAIT_S)
    pipe.send(writer_pid)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def started(target: object, *arguments: object) -> Iterator[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "everstep.checkpoint.engine", "crash_trainer"])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()
        process.close()


def hear(pipe: Connection) -> int:
    assert pipe.poll(WAIT_S), f"no word for {WAIT_S} s"
    said = pipe.recv()
    assert isinstance(said, int)
    return said


def crash(directory: Path, kill: Kill, *, first_step: int, scale: int) -> tuple[int, bool]:
    """Trains, kills, looks. The step found, and whether the kill fell into a save."""
    with started(train, directory, first_step, scale) as (process, pipe):
        durable = [hear(pipe)]
        writer_pid = hear(pipe)
        time.sleep(kill.after_s)
        durable += _drain(pipe)
        if kill.victim in (Victim.WRITER, Victim.BOTH):
            with suppress(ProcessLookupError):
                os.kill(writer_pid, signal.SIGKILL)
        if kill.victim is Victim.WRITER:
            time.sleep(0.03)  # The trainer goes on with a new writer, then dies too.
        writers = children_of(process)
        process.kill()
        process.join(WAIT_S)
        durable += _drain(pipe)
    was_saving = any(directory.glob(".step-*.partial"))
    for pid in writers:
        wait_gone(pid)
    assert wait_writers(directory, timeout_s=WAIT_S)
    last_told = max(durable)
    found = newest(directory)
    assert found is not None, f"step {last_told} was durable and is lost after {kill}"
    assert not found.passed_over, f"{found.passed_over} after {kill}"
    step, _ = what_is_in(found)
    assert step >= last_told, f"step {last_told} was durable, {step} is the newest after {kill}"
    return step, was_saving


def _drain(pipe: Connection) -> list[int]:
    said: list[int] = []
    with suppress(EOFError, OSError):
        while pipe.poll(0):
            said.append(pipe.recv())
    return said


def children_of(process: BaseProcess) -> list[int]:
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def wait_gone(pid: int) -> None:
    """For a process that is nobody's child here: its descriptor tells when it has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], WAIT_S)[0], f"writer {pid} still runs after {WAIT_S} s"
    finally:
        os.close(fd)
