"""A job that logs: MODEL DIRECTORY STEPS EVERY HELPERS OUT. HELPERS: a number, or `all`.

`--die R:S@STEP` ends a worker, as `kill -9` does, when everybody has finished the step before and
it has not begun this one: nobody can then finish it, so what is lost is the same in every run. The
events are expected in DIRECTORY/events.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import everstep
from equality_job import Points, job
from everstep.checkpoint.baselines import EverySteps
from everstep.core import points
from everstep.core.ids import WorkerId
from everstep.testing.faults import KillAt
from live import of, read_events

TOLD_WITHIN_S = 60.0
POLL_S = 0.01
LAYER_S = 0.004


class SlowPoints(Points):
    """Takes a while for each, so that a replay of the first or last stage does."""

    def __init__(self, *shape: int, sample_s: float) -> None:
        super().__init__(*shape)
        self._sample_s = sample_s

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._sample_s)
        return super().__getitem__(index)


class Slow(nn.Module):
    """A layer with a forward that takes a while: what replays and whole steps are expected to take
    are then told apart on a busy machine, too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(LAYER_S)
        output: Tensor = self.layer(x)
        return output


@dataclass(frozen=True, slots=True)
class Deaths:
    """What `--die` says, played once each: a mark in the folder outlives the process."""

    folder: Path
    kills: tuple[KillAt, ...]
    before: Callable[[Path], None]
    """What the dying worker still does."""

    def after(self, step: int, me: WorkerId) -> None:
        for number, kill in enumerate(self.kills):
            mark = self.folder / f"died-{number}"
            if (kill.place, kill.step - 1) != (me, step) or mark.exists():
                continue
            wait_told(self.folder, "step", step)
            self.before(self.folder)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def wait_told(folder: Path, event: str, step: int) -> None:
    deadline_s = time.monotonic() + TOLD_WITHIN_S
    while not any(e["step"] >= step for e in of(read_events(folder / "events.jsonl"), event)):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {event} event of step {step} in {TOLD_WITHIN_S} s")
        time.sleep(POLL_S)


def damage_log(folder: Path, stages: list[int]) -> None:
    """Flips a byte in every file that the workers of these stages have spilled."""
    joined = of(read_events(folder / "events.jsonl"), "worker_joined")
    pids = {event["pid"] for event in joined if event["stage"] in stages}
    for owner in (folder / "log").glob("*/owner.json"):
        if json.loads(owner.read_bytes())["pid"] in pids:
            for segment in owner.parent.glob("*.segment"):
                flip(segment)


def damage_checkpoint(folder: Path) -> None:
    """The newest."""
    for shard in max((folder / "ckpt").glob("step-*")).glob("shard-*"):
        flip(shard)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("every", type=int)
    parser.add_argument("helpers")
    parser.add_argument("out", type=Path)
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--clip", default="none")
    parser.add_argument("--memory", default="256MB")
    parser.add_argument("--with-replicas", action="store_true")
    parser.add_argument("--sample-s", type=float, default=0.0)
    parser.add_argument("--evaluate-after", type=int, default=-1)
    parser.add_argument("--die-evaluating")
    parser.add_argument("--damage-log", type=int, action="append", default=[])
    parser.add_argument("--damage-checkpoint", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend")
    return parser.parse_args()


def logged(options: argparse.Namespace) -> everstep.Job:
    folder: Path = options.folder
    saving = everstep.Checkpoints(directory=folder / "ckpt", policy=EverySteps(options.every))
    logging = everstep.Logging(
        budget="1GB",
        directory=folder / "log",
        helpers=None if options.helpers == "all" else int(options.helpers),
        memory=options.memory,
        with_replicas=options.with_replicas,
    )
    made = job(options.model, "adamw", options.clip)
    build = made.model
    made = replace(
        made,
        model=lambda: nn.Sequential(*map(Slow, build().children())),
        checkpoint=saving,
        log=logging,
        device=options.device,
        backend=options.backend,
    )
    if options.sample_s:
        return replace(made, dataset=SlowPoints(8, sample_s=options.sample_s))
    return made


def main(options: argparse.Namespace) -> None:
    # NCCL refuses two ranks on one device, unless it takes them for two machines.
    os.environ["NCCL_HOSTID"] = str(os.getpid())

    def before_death(folder: Path) -> None:
        damage_log(folder, options.damage_log)
        if options.damage_checkpoint:
            damage_checkpoint(folder)

    kills = tuple(KillAt.parse(text, field="--die") for text in options.die)
    deaths = Deaths(options.folder, kills, before_death)
    places: list[WorkerId] = []
    points.watch(lambda place, _point, _step: places.append(place))
    run = everstep.train(logged(options), steps=options.steps)
    (me,) = set(places)
    if options.die_evaluating == str(me):
        points.watch(_die_evaluating(options.folder / "died-evaluating"))
    else:
        points.watch(None)
    indices = []
    for step in run:
        indices.append(step.index)
        deaths.after(step.index, me)
        if step.index == options.evaluate_after:
            run.evaluate(Points(8))
    weights = run.state_dict()
    if options.with_replicas:
        own = run._holding.stage.module.module.state_dict()
        torch.save(own, options.folder / f"stage-{me.stage}-{me.replica}.pt")
    if run.is_reporter:
        torch.save({"indices": indices, "weights": weights}, options.out)


def _die_evaluating(mark: Path) -> points.Watcher:
    def watcher(place: WorkerId, point: points.Point, step: int) -> None:
        del place, step
        if point is points.Point.BEFORE_EVALUATE and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return watcher


if __name__ == "__main__":
    main(arguments())
