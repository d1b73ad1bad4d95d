"""Shows: how good and how fast the planner's plans are, against its bars.
Run:   python benchmarks/planner.py          (about a minute; --sweep N for N shapes of each kind)

Exits with status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from everstep.core.errors import NotPlannable
from everstep.core.ids import WorkerId
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.plan import Plan
from everstep.schedule.planner import UNHURRIED, Effort, plan
from everstep.schedule.problem import Problem, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    what: str
    made: Plan
    seconds: float
    bar: str
    is_met: bool


def problem(
    shape: tuple[int, int, int],
    lost: Iterable[WorkerId] = (),
    *,
    limit: int | None = None,
    durations: Durations | None = None,
    variant: Variant = Variant.DECOUPLED_STAGGERED,
) -> Problem:
    replicas, stages, microbatches = shape
    return Problem(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        lost=frozenset(lost),
        durations=durations or Durations.uniform(stages),
        in_flight=None if limit is None else (limit,) * stages,
        variant=variant,
    )


def some_losses(shape: tuple[int, int, int], number: int, *, seed: int) -> list[WorkerId]:
    replicas, stages, _ = shape
    workers = [WorkerId(r, s) for r in range(replicas) for s in range(stages)]
    return random.Random(seed).sample(workers, number)


def timed(question: Problem, effort: Effort) -> tuple[Plan, float]:
    begin = time.perf_counter()
    made = plan(question, effort)
    return made, time.perf_counter() - begin


def is_near(made: Plan) -> bool:
    """Within 2 % of the bound, or 2 slots if that is more."""
    return made.period - made.lower_bound <= max(2.0, 0.02 * made.lower_bound) + 1e-9


def speed_rows() -> Iterable[Row]:
    for shape, num_lost, limit_s in (
        ((3, 4, 6), 1, 0.02),
        ((16, 8, 64), 13, 1.0),
        ((32, 8, 64), 25, 5.0),
        ((64, 8, 16), 25, 0.5),
        ((64, 16, 32), 50, 10.0),
    ):
        lost = some_losses(shape, num_lost, seed=1)
        # The best of three: other work on the machine is not the planner's.
        runs = [timed(problem(shape, lost), Effort()) for _ in range(3)]
        made, seconds = runs[0][0], min(seconds for _, seconds in runs)
        is_large = shape > (32, 8, 64)
        yield Row(
            what=f"{_shape(shape)}, {num_lost} lost, greedy",
            made=made,
            seconds=seconds,
            bar=f"{'' if is_large else 'near bound, '}< {limit_s:g} s",
            is_met=(is_large or is_near(made)) and seconds < limit_s,
        )


def memory_rows() -> Iterable[Row]:
    shape = (4, 8, 16)
    for stage in range(8):
        question = problem(shape, [WorkerId(1, stage)], limit=8)
        greedy = plan(question)
        made, seconds = timed(question, Effort(improve_s=2.0))
        is_met = made.period <= greedy.period and seconds < 2.5
        # The proof that no plan reaches 70 slots: nothing is asked that cannot be.
        if made.lower_bound <= 70:
            bar, is_met = "<= 70 in 2 s", is_met and made.period <= 70
        else:
            bar = f"70 proved impossible (>= {made.lower_bound:g})"
        yield Row(
            what=f"{_shape(shape)}, 1:{stage} lost, limit 8 (greedy {greedy.period:g})",
            made=made,
            seconds=seconds,
            bar=bar,
            is_met=is_met,
        )


def unequal_rows() -> Iterable[Row]:
    slow = StageDurations(forward=2, input_gradient=2, weight_gradient=2)
    for lost in ([], [WorkerId(1, 2)], [WorkerId(1, 3)]):
        durations = Durations(stages=(StageDurations(),) * 3 + (slow,), transfer=0.2, optimizer=0.5)
        for limit in (None, 4):
            question = problem((3, 4, 6), lost, durations=durations, limit=limit)
            made, seconds = timed(question, UNHURRIED)
            yield Row(
                what=f"3x4x6 unequal, lost {' '.join(map(str, lost)) or '-'}, limit {limit or '-'}",
                made=made,
                seconds=seconds,
                bar="valid, gap reported",
                is_met=True,
            )


def any_shape(rng: random.Random) -> tuple[tuple[int, int, int], int]:
    """Up to 32 x 8 x 64, and a number of losses up to 10 % of the workers."""
    shape = (rng.randint(1, 32), rng.randint(1, 8), rng.randint(1, 64))
    return shape, rng.randint(0, shape[0] * shape[1] // 10)


def hard_shape(rng: random.Random) -> tuple[tuple[int, int, int], int]:
    """Several losses and few micro-batches: delays of one stage add to those of the next."""
    while True:
        (replicas, stages, microbatches), num_lost = any_shape(rng)
        if stages >= 4 and microbatches <= 2 * stages and num_lost >= 2:
            return (replicas, stages, microbatches), num_lost


def sweep(
    num_shapes: int, draw: Callable[[random.Random], tuple[tuple[int, int, int], int]]
) -> Iterable[str]:
    """Random shapes, planned as the command does; yields those that are far from the bound."""
    rng = random.Random(7)
    num_planned = 0
    while num_planned < num_shapes:
        shape, num_lost = draw(rng)
        seed = rng.randrange(1 << 30)
        try:
            question = problem(shape, some_losses(shape, num_lost, seed=seed))
        except NotPlannable:
            continue
        made = plan(question, UNHURRIED)
        num_planned += 1
        if sys.stderr.isatty():
            print(f"\rsweep {num_planned}/{num_shapes}", end="", file=sys.stderr, flush=True)
        if not is_near(made):
            yield (
                f"{_shape(shape)} with {num_lost} lost (seed {seed}): {made.period:g},"
                f" bound {made.lower_bound:g}"
            )


def _shape(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", type=int, default=100, help="how many shapes of each kind")
    num_shapes = parser.parse_args().sweep
    print(f"{'what':52}{'period':>8}{'bound':>8}{'gap':>8}{'seconds':>9}  bar")
    missed = 0
    for rows in (speed_rows(), memory_rows(), unequal_rows()):
        for row in rows:
            missed += not row.is_met
            print(
                f"{row.what:52}{row.made.period:8g}{row.made.lower_bound:8g}"
                f"{row.made.gap_fraction:8.1%}{row.seconds:9.3f}"
                f"  {row.bar}: {'met' if row.is_met else 'MISSED'}",
                flush=True,
            )
    for what, draw in (("random", any_shape), ("hard", hard_shape)):
        far = list(sweep(num_shapes, draw))
        missed += len(far)
        print(
            f"sweep: {num_shapes - len(far)} of {num_shapes} {what} shapes up to 32x8x64 with up"
            f" to 10 % lost are within 2 % or 2 slots: {'met' if not far else 'MISSED'}"
        )
        for line in far:
            print(f"  {line}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
