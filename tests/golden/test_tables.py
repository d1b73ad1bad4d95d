"""The tables of schedules for 3 replicas x 4 stages x 6 micro-batches, F = B = W = 1, from the
command. The numbers were first found with CP-SAT, independently of this planner."""

from __future__ import annotations

import pytest

from command import SHAPE_3X4X6, everstep

NO_FAILURE = [
    # variant, in-flight limit, makespan, period
    ("one-f-one-b", "4,3,2,1", 27, 27),
    ("decoupled-staggered", "4,3,2,1", 24, 24),
    ("decoupled-staggered", "4", 21, 21),
    ("decoupled-staggered", None, 21, 19),
    ("decoupled-sync", None, 21, 21),
    ("glued-sync", None, 27, 27),
]

ONE_LOST = [
    # variant, in-flight limit, period when the lost worker is of stage 0, 1, 2, 3
    ("glued-sync", None, [29, 30, 33, 36]),
    ("decoupled-sync", None, [27, 28, 29, 30]),
    ("decoupled-staggered", None, [27, 27, 27, 27]),
    ("decoupled-staggered", "4", [30, 28, 29, 30]),
    ("decoupled-staggered", "4,3,2,1", [30, 31, 32, 33]),
]


@pytest.mark.parametrize(("variant", "limit", "makespan", "period"), NO_FAILURE)
def test_a_schedule_without_failure(
    variant: str, limit: str | None, makespan: int, period: int
) -> None:
    flags = f" --in-flight {limit}" if limit else ""
    made = everstep(f"{SHAPE_3X4X6} --variant {variant} --format json{flags}").json()
    assert (made["makespan"], made["period"]) == (makespan, period)
    assert made["proved_optimal"]
    assert made["baselines"]["one_f_one_b"] == 27


@pytest.mark.parametrize(
    ("variant", "limit", "stage", "period"),
    [
        (variant, limit, stage, period)
        for variant, limit, periods in ONE_LOST
        for stage, period in enumerate(periods)
    ],
)
def test_a_schedule_with_one_lost_worker(
    variant: str, limit: str | None, stage: int, period: int
) -> None:
    flags = f" --in-flight {limit}" if limit else ""
    made = everstep(
        f"{SHAPE_3X4X6} --lost 1:{stage} --variant {variant} --format json{flags}"
    ).json()
    assert made["period"] == period
    assert made["lower_bound"] <= period
    assert made["lost"] == [[1, stage]]


def test_the_exact_solver_proves_what_the_bound_leaves_open() -> None:
    """The bound is 28, the improver finds 29; that 28 is impossible takes a solver."""
    question = f"{SHAPE_3X4X6} --lost 1:0 --variant glued-sync --format json"
    assert not everstep(question).json()["proved_optimal"]
    proved = everstep(f"{question} --improve 0 --exact 60").json()
    assert (proved["period"], proved["lower_bound"], proved["proved_optimal"]) == (29, 29, True)


def test_the_exact_solver_finds_the_hard_plan_that_greedy_misses() -> None:
    """At an in-flight limit of 4 greedy alone needs 34 slots after the loss of 1:0; 30 is best."""
    question = f"{SHAPE_3X4X6} --lost 1:0 --in-flight 4 --improve 0 --format json"
    assert everstep(question).json()["period"] > 30
    found = everstep(f"{question} --exact 60").json()
    assert (found["period"], found["proved_optimal"]) == (30, True)
