"""Kills a process while it saves, at a seeded moment, and looks at what is left. Public.

A saver is a pair of functions, so that other libraries go through the same harness: `train` saves
step after step in a process of its own and tells what is durable; `look` reads the newest save as a
user would. Every element of a state says its step, so that a mix of two steps shows.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch

from everstep.checkpoint.engine import Engine, EngineSettings, Event
from everstep.checkpoint.restore import newest, wait_writers
from everstep.checkpoint.state import FlatState

WAIT_S = 60.0
_NAMES = ("model/a", "model/b", "optimizer/a", "optimizer/b")


class Victim(StrEnum):
    TRAINER = "trainer"
    HELPERS = "helpers"
    """The processes it started: writers. The trainer follows a little later."""
    BOTH = "both"


class Outcome(StrEnum):
    INTACT = "intact"
    """The newest save is of one step, and none that was told to be durable is newer."""
    LOST = "lost"
    MIXED = "mixed"
    """It is read without a complaint, and holds tensors of several steps."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    victim: Victim
    after_s: float
    """From the trainer's first durable save on."""


Train: TypeAlias = Callable[[Connection, Path, int, int], None]
"""A pipe, a directory, the first step, elements per tensor. Sends steps that are durable."""
Look: TypeAlias = Callable[[Path, int], Mapping[str, torch.Tensor]]
"""The newest save in a directory, of so many elements per tensor. Raises when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    outcome: Outcome
    newest_step: int
    was_saving: bool
    """Something half-written was there: the kill fell into a save."""


def kills(num: int, *, seed: int, within_s: float) -> Iterator[Kill]:
    generator = random.Random(seed)
    for _ in range(num):
        victim = generator.choice(list(Victim))
        yield Kill(victim=victim, after_s=generator.uniform(0, within_s))


def tensors_of(step: int, num_elements: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((num_elements,), float(step)) for name in _NAMES}


def train_with_everstep(pipe: Connection, directory: Path, step: int, num_elements: int) -> None:
    torch.set_num_threads(1)

    def heard(event: Event) -> None:
        if event["event"] == "checkpoint":
            pipe.send(event["step"])

    logging.disable(logging.WARNING)  # Its writer is going to be killed, again and again.
    engine = Engine(directory, settings=EngineSettings(probe_bytes=0), on_event=heard)
    while True:
        tensors = tensors_of(step, num_elements)
        engine.save(step, FlatState(tensors=tensors), wait_s=WAIT_S)
        engine.before_update()
        for tensor in tensors.values():
            tensor.fill_(-1.0)  # A copy that still reads the tensors shows.
        step += 1


def look_with_everstep(directory: Path, _: int) -> Mapping[str, torch.Tensor]:
    assert wait_writers(directory, timeout_s=WAIT_S)
    found = newest(directory)
    assert found is not None, "there is no checkpoint"
    assert not found.passed_over, f"a broken one is visible: {found.passed_over}"
    return found.read().tensors


def crash(
    directory: Path, kill: Kill, *, train: Train, look: Look, first_step: int, num_elements: int
) -> Crash:
    with started(train, directory, first_step, num_elements) as (process, pipe):
        durable = [hear(pipe)]
        time.sleep(kill.after_s)
        helpers = children_of(process)
        if kill.victim is not Victim.TRAINER:
            _kill(helpers)
        if kill.victim is Victim.HELPERS:
            time.sleep(0.03)  # It goes on with a new one, then dies too.
            helpers = children_of(process)
        process.kill()
        process.join(WAIT_S)
        durable += _drain(pipe)
    was_saving = any(directory.glob(".step-*.partial"))
    for pid in helpers:
        wait_gone(pid)
    try:
        tensors = look(directory, num_elements)
    except Exception:  # noqa: BLE001 whatever a library raises, its save cannot be read
        return Crash(outcome=Outcome.UNREADABLE, newest_step=max(durable), was_saving=was_saving)
    steps = {int(step) for tensor in tensors.values() for step in tensor.unique().tolist()}  # type: ignore[no-untyped-call]
    outcome = Outcome.LOST if max(steps) < max(durable) else Outcome.INTACT
    outcome = Outcome.MIXED if len(steps) > 1 else outcome
    return Crash(outcome=outcome, newest_step=max(steps), was_saving=was_saving)


@contextmanager
def started(
    target: Callable[..., None], *arguments: Any
) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process from a warm parent, and the pipe it was given first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "everstep.testing.crashes"])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
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
        assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} still runs after {WAIT_S} s"
    finally:
        os.close(fd)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _drain(pipe: Connection) -> list[int]:
    said: list[int] = []
    with suppress(EOFError, OSError):
        while pipe.poll(0):
            said.append(pipe.recv())
    return said
