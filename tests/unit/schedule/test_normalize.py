from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, product

from hypothesis import given

from everstep.core.ids import WorkerId
from everstep.schedule.bounds import lower_bound
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.normalize import (
    Move,
    Normalize,
    Stay,
    best_distribution,
    decide_normalization,
)
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem
from everstep.schedule.workload import workload
from problems import problem, problems

TWO_IN_ONE_STAGE = problem((4, 3, 12), [(0, 1), (1, 1)])
"""Stage 1 has 2 of 4 workers left: 24 micro-batches each, 72 slots; evened out, 16 and 49."""


def test_a_move_pays_when_the_losses_last_long_enough() -> None:
    decision = decide_normalization(TWO_IN_ONE_STAGE, copy=46.0, horizon=1e6)
    assert isinstance(decision, Normalize)
    assert decision.moves == (Move(WorkerId(0, 2), WorkerId(0, 1)),)
    assert decision.lost == {WorkerId(0, 2), WorkerId(1, 1)}
    assert (decision.period_before, decision.period_after) == (72, 49)
    assert decision.pays_after_steps == 2.0
    assert "0:2 to 0:1" in decision.reason
    assert "pays after 2 steps" in decision.reason


def test_nobody_moves_when_the_losses_will_not_last() -> None:
    decision = decide_normalization(TWO_IN_ONE_STAGE, copy=46.0, horizon=90.0)
    assert isinstance(decision, Stay)
    assert decision.pays_after_steps == 2.0
    assert "more than the 90 the losses are expected to last" in decision.reason


def test_nobody_moves_when_the_losses_are_spread_already() -> None:
    spread = problem((4, 3, 8), [(0, 1), (1, 2)])
    decision = decide_normalization(spread, copy=0.0, horizon=1e6)
    assert decision == Stay(reason="the losses already lie as well as they can")


def test_nobody_moves_without_losses() -> None:
    assert decide_normalization(problem(), copy=0.0, horizon=1e6) == Stay(reason="nobody is lost")


def test_the_best_distribution_is_even_when_all_stages_are_alike() -> None:
    assert sorted(best_distribution(problem((3, 4, 6), [(0, 1), (1, 1)]))) == [0, 0, 1, 1]
    four = problem((3, 4, 6), [(0, 1), (1, 1), (0, 2), (1, 2)])
    assert best_distribution(four) == (1, 1, 1, 1)


def test_losses_belong_where_the_stage_is_short() -> None:
    """Stage 2 does a third of the others' work, so two workers are missed least there."""
    short = StageDurations(forward=0.3, input_gradient=0.3, weight_gradient=0.3)
    durations = Durations(stages=(StageDurations(), StageDurations(), short))
    question = problem((4, 3, 24), [(0, 0), (1, 0)], durations=durations)
    assert best_distribution(question) == (0, 0, 2)
    decision = decide_normalization(question, copy=1.0, horizon=1e6)
    assert isinstance(decision, Normalize)
    assert {move.donor.stage for move in decision.moves} == {2}


@given(problem=problems())
def test_no_distribution_of_the_same_losses_has_a_lower_bound_or_fewer_moves(
    problem: Problem,
) -> None:
    best = best_distribution(problem)
    assert sum(best) == len(problem.lost)

    def bound(losses: tuple[int, ...]) -> int:
        lost = frozenset(WorkerId(r, s) for s, num in enumerate(losses) for r in range(num))
        return lower_bound(workload(replace(problem, lost=lost)))

    everywhere = product(range(problem.replicas), repeat=problem.stages)
    alternatives = islice((a for a in everywhere if sum(a) == len(problem.lost)), 200)
    losses_now = Counter(worker.stage for worker in problem.lost)

    def num_moved(losses: tuple[int, ...]) -> int:
        return sum(max(0, losses_now[stage] - num) for stage, num in enumerate(losses))

    for losses in alternatives:
        assert (bound(best), num_moved(best)) <= (bound(losses), num_moved(losses))


@given(problem=problems())
def test_remembered_periods_lead_to_the_same_decision(problem: Problem) -> None:
    remembered = {problem.lost: plan(problem).period}

    def period_of(asked: Problem) -> float:
        return remembered.setdefault(asked.lost, plan(asked).period)

    decision = decide_normalization(problem, copy=1.0, horizon=1e6, period_of=period_of)
    assert decision == decide_normalization(problem, copy=1.0, horizon=1e6)
