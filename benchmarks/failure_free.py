"""What everstep costs and gains while nothing fails, against its own plans and against torch.

Shows: step times side by side in one run, as ratios with the bars they must keep:
       - measured against planned period, on emulated devices (their F, B and W take 30 ms);
       - against torch's Schedule1F1B and ScheduleInterleavedZeroBubble on the same devices;
       - against DistributedDataParallel, one stage, 2 replicas, a real model on the processor;
       - the time from `everstep run` to the first step with 12 workers.
Run:   python benchmarks/failure_free.py [--quick] [--only plan|pipelines|ddp ...]
Exits with 1 when a bar is missed. Takes about 9 minutes, 5 with --quick.

Sides that are compared take turns, and a ratio is the median over the turns, so that a slow moment
of the machine does not hit one side alone. The middle half of the turns is printed with it. The
comparison with DDP fills two cores: do nothing else on the machine, see the load printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem
from launched import SETTLE_STEPS, EverstepRun, run_everstep, run_other, say

DEVICE_S = 0.03
"""F, B and W of an emulated device."""

PROFILED_STEPS = 5
"""Until everstep has measured and planned; the other sides leave as many steps out."""

WARM_UP_STEPS = PROFILED_STEPS + SETTLE_STEPS

STEPS_PER_TURN = 4
WARM_UP_TURNS = 2

LARGEST_LOSS_DIFFERENCE = 1e-5
"""Relative, between everstep and DDP: shows that both did the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    steps: int
    """Per run on emulated devices, after warming up."""

    rounds: int
    """Runs of each side on emulated devices."""

    turns: int
    """Of each side on the real model, after warming up."""


FULL = Size(steps=15, rounds=3, turns=60)
QUICK = Size(steps=8, rounds=2, turns=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    replicas: int
    stages: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.replicas}x{self.stages}x{self.microbatches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One line of the table: ours / theirs, turn by turn."""

    what: str
    ours_s: Sequence[float]
    theirs_s: Sequence[float]
    bar: float | None = None
    """The ratio may be at most this; None where it is only shown."""

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def is_kept(self) -> bool:
        return self.bar is None or median(self.ratios) <= self.bar

    def __str__(self) -> str:
        ours_ms, theirs_ms = 1e3 * median(self.ours_s), 1e3 * median(self.theirs_s)
        low, high = _middle_half(self.ratios)
        spread = f"{low:.3f}..{high:.3f}"
        bar = "-" if self.bar is None else f"{self.bar:.2f}"
        verdict = "" if self.bar is None else "kept" if self.is_kept else "MISSED"
        return (
            f"{self.what:52} {ours_ms:9.1f} {theirs_ms:9.1f} {median(self.ratios):7.3f}"
            f" {spread:>14} {bar:>5} {verdict}"
        )


HEADER = (
    f"{'ours / theirs':52} {'ours ms':>9} {'theirs ms':>9} {'ratio':>7} {'middle half':>14}"
    f" {'bar':>5}"
)


def main() -> int:
    """Prints the table and says whether every bar is kept."""
    parts: dict[str, Callable[[Size], Iterator[Verdict]]] = {
        "plan": against_plan,
        "pipelines": against_pipelines,
        "ddp": against_ddp,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and turns")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    # As with Ctrl-C, the side that is running is ended, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start")
    print(HEADER, flush=True)
    missed = []
    for name in args.only:
        for verdict in parts[name](QUICK if args.quick else FULL):
            print(verdict, flush=True)
            if not verdict.is_kept:
                missed.append(verdict.what)
    print(
        f"load average {os.getloadavg()[0]:.1f} at the end; missed: {', '.join(missed) or 'none'}"
    )
    return 1 if missed else 0


def against_plan(size: Size) -> Iterator[Verdict]:
    """The first shape has the 12 workers whose start is timed, too."""
    for shape in (
        Shape(replicas=3, stages=4, microbatches=6),
        Shape(replicas=2, stages=8, microbatches=16),
    ):
        say(f"{shape} on emulated devices")
        run = _emulated(shape, size)
        if shape.replicas * shape.stages == 12:
            yield Verdict(
                what="12 workers: `everstep run` to the first step, of 15 s",
                ours_s=[run.first_step_s],
                theirs_s=[15.0],
                bar=1.0,
            )
        measured_s = [median(run.step_times_s)]
        yield Verdict(
            what=f"{shape}: measured / planned period",
            ours_s=measured_s,
            theirs_s=[run.planned_s],
            bar=1.05,
        )
        yield Verdict(
            what=f"{shape}: measured / ideal period of the nominal times",
            ours_s=measured_s,
            theirs_s=[_ideal_period_s(shape)],
        )


def against_pipelines(size: Size) -> Iterator[Verdict]:
    """One replica: torch's pipelines have no notion of a second."""
    shape = Shape(replicas=1, stages=4, microbatches=8)
    ours_s, limited_s, one_f_one_b_s, zero_bubble_s = [], [], [], []
    for number in range(size.rounds):
        say(f"{shape} on emulated devices, round {number + 1} of {size.rounds}")
        ours_s.append(median(_emulated(shape, size).step_times_s))
        one_f_one_b_s.append(_torch_pipeline_s("1f1b", shape, size))
        zero_bubble_s.append(_torch_pipeline_s("zero-bubble", shape, size))
        limited = _emulated(shape, size, in_flight=shape.stages)
        limited_s.append(median(limited.step_times_s))
    yield Verdict(
        what=f"{shape}: everstep / Schedule1F1B",
        ours_s=ours_s,
        theirs_s=one_f_one_b_s,
        bar=0.85,
    )
    yield Verdict(
        what=f"{shape}: everstep / ScheduleInterleavedZeroBubble",
        ours_s=ours_s,
        theirs_s=zero_bubble_s,
        bar=1.0,
    )
    yield Verdict(
        what=f"{shape}: everstep, {shape.stages} in flight / Schedule1F1B",
        ours_s=limited_s,
        theirs_s=one_f_one_b_s,
        bar=1.0,
    )


def against_ddp(size: Size) -> Iterator[Verdict]:
    """A real model: both sides fill two cores, so anything else on them adds to the spread."""
    for microbatches in (1, 4):
        say(f"2x1x{microbatches} on the processor, {size.turns} turns of {STEPS_PER_TURN} steps")
        with tempfile.TemporaryDirectory() as folder:
            args = (microbatches, size.turns + WARM_UP_TURNS, STEPS_PER_TURN, folder)
            run = run_everstep("ddp_job.py", *args, replicas=2, stages=1)
            measured = json.loads((Path(folder) / "measured.json").read_text())
        _check_same_losses([step["loss"] for step in run.of("step")], measured["losses"])
        yield Verdict(
            what=f"2x1x{microbatches}: everstep / DistributedDataParallel",
            ours_s=measured["everstep"][WARM_UP_TURNS:],
            theirs_s=measured["ddp"][WARM_UP_TURNS:],
            bar=1.02,
        )


def _emulated(shape: Shape, size: Size, *, in_flight: int | None = None) -> EverstepRun:
    limit = () if in_flight is None else ("--in-flight", in_flight)
    return run_everstep(
        "emulated_job.py",
        *(shape.replicas, shape.stages, shape.microbatches, size.steps + WARM_UP_STEPS),
        *(DEVICE_S, DEVICE_S, DEVICE_S, *limit),
        replicas=shape.replicas,
        stages=shape.stages,
    )


def _torch_pipeline_s(kind: str, shape: Shape, size: Size) -> float:
    num_steps = size.steps + WARM_UP_STEPS
    times = (DEVICE_S, DEVICE_S, DEVICE_S)
    seconds: list[float] = run_other(
        "torch_pipeline.py", kind, shape.stages, shape.microbatches, num_steps, *times
    )
    return median(seconds[WARM_UP_STEPS:])


def _ideal_period_s(shape: Shape) -> float:
    """Of devices that take exactly their time, with free transfers and updates."""
    # An emulated first stage pays for B in W, as real ones nearly do.
    first = StageDurations(forward=DEVICE_S, input_gradient=0.0, weight_gradient=2 * DEVICE_S)
    other = StageDurations(forward=DEVICE_S, input_gradient=DEVICE_S, weight_gradient=DEVICE_S)
    problem = Problem(
        replicas=shape.replicas,
        stages=shape.stages,
        microbatches=shape.microbatches,
        durations=Durations(stages=(first, *(other,) * (shape.stages - 1))),
    )
    return plan(problem, Effort(improve_s=1.0)).period


def _middle_half(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = quantiles(values, n=4)
    return low, high


def _check_same_losses(ours: Sequence[float], theirs: Sequence[float]) -> None:
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    if worst > LARGEST_LOSS_DIFFERENCE:
        sys.exit(f"the sides did different work: their losses differ by up to {worst:.1e} relative")


if __name__ == "__main__":
    sys.exit(main())
