"""SIGKILLs at random moments of saving: what is left, with everstep and with stock DCP.

    python benchmarks/checkpoint_crash.py [--kills 200] [--size-mb 32] [--only NAME]

Each trainer saves step after step, in a process of its own, until it or what it started is killed;
then the newest save is read as its documentation says. The kills are the same, seeded, for all.
Exits 1 when everstep loses, mixes or cannot read anything.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.testing.crashes import (
    Look,
    Outcome,
    Train,
    crash,
    kills,
    look_with_everstep,
    tensors_of,
    train_with_everstep,
)

SEED = 20
KILL_WITHIN_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    name: str
    train: Train
    look: Look


def overwrite_with_dcp(pipe: Connection, directory: Path, step: int, num_elements: int) -> None:
    """One directory, saved again and again: what `dcp.save(checkpoint_id=...)` does by default."""
    _quiet()
    while True:
        save(tensors_of(step, num_elements), checkpoint_id=directory / "dcp", no_dist=True)
        pipe.send(step)
        step += 1


def look_at_overwritten(directory: Path, num_elements: int) -> Mapping[str, torch.Tensor]:
    return _load(directory / "dcp", num_elements)


def overwrite_files_with_dcp(
    pipe: Connection, directory: Path, step: int, num_elements: int
) -> None:
    """The same with a file for each tensor, as each rank of a larger job has its own."""
    _quiet()
    while True:
        writer = FileSystemWriter(directory / "dcp", single_file_per_rank=False)
        save(tensors_of(step, num_elements), storage_writer=writer, no_dist=True)
        pipe.send(step)
        step += 1


def number_with_dcp(pipe: Connection, directory: Path, step: int, num_elements: int) -> None:
    """A directory for each step; the newest is the one with the highest number."""
    _quiet()
    while True:
        path = directory / f"step-{step:09}"
        save(tensors_of(step, num_elements), checkpoint_id=path, no_dist=True)
        pipe.send(step)
        shutil.rmtree(directory / f"step-{step - 2:09}", ignore_errors=True)
        step += 1


def look_at_numbered(directory: Path, num_elements: int) -> Mapping[str, torch.Tensor]:
    return _load(max(directory.iterdir()), num_elements)


def _load(path: Path, num_elements: int) -> Mapping[str, torch.Tensor]:
    tensors = tensors_of(-1, num_elements)
    try:
        load(tensors, checkpoint_id=path, no_dist=True)
    except CheckpointException as error:  # Not an Exception, in torch's eyes.
        raise RuntimeError(str(error)) from None
    return tensors


def _warm_up() -> None:
    """The parent of all trainers has what each would load: half of a kill's time was imports."""
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.checkpoint.state_dict_saver", "everstep.testing.crashes"]
    )
    forkserver.ensure_running()


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


SAVERS = (
    Saver(name="everstep", train=train_with_everstep, look=look_with_everstep),
    Saver(name="dcp.save, one directory", train=overwrite_with_dcp, look=look_at_overwritten),
    Saver(name="  with several files", train=overwrite_files_with_dcp, look=look_at_overwritten),
    Saver(name="dcp.save, one per step", train=number_with_dcp, look=look_at_numbered),
)


def count(saver: Saver, directory: Path, *, num_kills: int, size_bytes: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    step = -1
    for kill in kills(num_kills, seed=SEED, within_s=KILL_WITHIN_S):
        directory.mkdir(exist_ok=True)
        crashed = crash(
            directory,
            kill,
            train=saver.train,
            look=saver.look,
            first_step=step + 1,
            num_elements=size_bytes // 4 // 4,
        )
        counts[crashed.outcome] += 1
        counts["in a save"] += crashed.was_saving
        step = crashed.newest_step
        if crashed.outcome is not Outcome.INTACT:
            shutil.rmtree(directory)  # A user would begin anew, too.
        for old in sorted(directory.glob("step-*"))[:-2] if directory.exists() else ():
            shutil.rmtree(old)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--size-mb", type=float, default=32.0)
    parser.add_argument("--only", default="", help="Those whose name begins so.")
    parser.add_argument("--directory", help="Where files go, and are removed.")
    arguments = parser.parse_args()
    _quiet()
    logging.disable(logging.ERROR)  # DCP logs a traceback for each save that it cannot read.
    _warm_up()
    load_before = os.getloadavg()[0]
    root = Path(tempfile.mkdtemp(prefix="everstep-crash-", dir=arguments.directory))
    try:
        results = {
            saver.name: count(
                saver,
                root / saver.train.__name__,
                num_kills=arguments.kills,
                size_bytes=int(arguments.size_mb * 1e6),
            )
            for saver in SAVERS
            if saver.name.startswith(arguments.only)
        }
    finally:
        shutil.rmtree(root)
    print(
        f"{arguments.kills} SIGKILLs each, state {arguments.size_mb:g} MB, seed {SEED},"
        f" load {load_before:.1f} to {os.getloadavg()[0]:.1f}"
    )
    print(f"{'newest save after a kill':28}" + "".join(f"{kind:>12}" for kind in Outcome))
    for name, counts in results.items():
        print(f"{name:28}" + "".join(f"{counts[kind]:>12}" for kind in Outcome))
    ours = results.get("everstep")
    if ours is None:
        return 0
    print(f"everstep: {ours['in a save']} of them left something half-written, which nobody reads")
    return 0 if ours[Outcome.INTACT] == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
