"""The choice of what to replay, against every choice there is."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.ids import WorkerId
from everstep.membership.facts import LogDirection, LogRun
from everstep.recovery.coverage import choose_range, senders

FIRST_STEP, LAST_STEP = 3, 7
STEPS = range(FIRST_STEP, LAST_STEP + 1)
Holdings = dict[WorkerId, list[LogRun]]


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, Holdings, frozenset[int]]:
    """Mostly whole logs with some holes: else nothing but the whole model could be chosen."""
    num_stages = draw(st.integers(1, 6))
    num_microbatches = draw(st.integers(1, 3))
    stages = st.integers(0, num_stages - 1)
    lost = draw(st.frozensets(stages, max_size=num_stages))
    microbatches = tuple(range(num_microbatches))
    holdings: Holdings = {WorkerId(r, s): [] for r in range(2) for s in range(num_stages)}
    workers = st.sampled_from(sorted(holdings))
    for boundary in range(num_stages - 1):
        for direction in LogDirection:
            if draw(st.booleans()):
                run = LogRun(boundary, direction, FIRST_STEP - 1, LAST_STEP, 1, microbatches)
                holdings[draw(workers)].append(run)
    some = st.lists(st.sampled_from(microbatches), min_size=1, unique=True)
    for _ in range(draw(st.integers(0, 8)) if num_stages > 1 else 0):
        first, last = sorted(draw(st.tuples(st.integers(1, 9), st.integers(1, 9))))
        run = LogRun(
            draw(st.integers(0, num_stages - 2)),
            draw(st.sampled_from(LogDirection)),
            first,
            last,
            draw(st.integers(1, 3)),
            tuple(sorted(draw(some))),
        )
        holdings[draw(workers)].append(run)
    return num_stages, num_microbatches, holdings, lost


def holds(run: LogRun, boundary: int, direction: LogDirection, step: int) -> bool:
    return (run.boundary, run.direction) == (boundary, direction) and (
        run.first_step <= step <= run.last_step
    )


def newest_whole(
    holdings: Holdings, boundary: int, direction: LogDirection, step: int, num_microbatches: int
) -> int | None:
    """Said in the plainest way."""
    for attempt in (3, 2, 1):
        held = {
            microbatch
            for runs in holdings.values()
            for run in runs
            if holds(run, boundary, direction, step) and run.attempt == attempt
            for microbatch in run.microbatches
        }
        if held == set(range(num_microbatches)):
            return attempt
    return None


def every_choice(num_stages: int, lost: frozenset[int]) -> list[list[tuple[int, int]]]:
    """Each set of stages that holds the lost ones, as ranges that do not touch."""
    choices = []
    for mask in range(1 << num_stages):
        chosen = [stage for stage in range(num_stages) if mask >> stage & 1]
        if lost <= set(chosen):
            rows = groupby(enumerate(chosen), key=lambda pair: pair[1] - pair[0])
            listed = [[stage for _, stage in row] for _, row in rows]
            choices.append([(row[0], row[-1]) for row in listed])
    return choices


@given(situations())
def test_the_chosen_ranges_are_the_best_of_all_that_can_be_replayed(
    situation: tuple[int, int, Holdings, frozenset[int]],
) -> None:
    num_stages, num_microbatches, holdings, lost = situation

    def is_logged(boundary: int, direction: LogDirection) -> bool:
        if boundary in (-1, num_stages - 1):
            return True
        found = [newest_whole(holdings, boundary, direction, s, num_microbatches) for s in STEPS]
        return None not in found

    possible = [
        choice
        for choice in every_choice(num_stages, lost)
        if all(
            is_logged(first - 1, LogDirection.FORWARD) and is_logged(last, LogDirection.BACKWARD)
            for first, last in choice
        )
    ]
    best = min(possible, key=lambda choice: (sum(b - a + 1 for a, b in choice), choice))
    chosen = choose_range(
        lost,
        holdings,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        first_step=FIRST_STEP,
        last_step=LAST_STEP,
    )
    if best == [(0, num_stages - 1)]:
        assert chosen is None
        return
    assert chosen is not None
    assert [(each.first_stage, each.last_stage) for each in chosen] == best
    for each in chosen:
        inside = set(range(each.first_stage, each.last_stage + 1))
        assert ("alone cannot" in each.reason) == (not inside <= lost)


@given(situations())
def test_every_step_is_asked_of_holders_of_its_newest_whole_attempt(
    situation: tuple[int, int, Holdings, frozenset[int]],
) -> None:
    num_stages, num_microbatches, holdings, _ = situation
    for boundary in range(num_stages - 1):
        for direction in LogDirection:
            supplies = senders(
                holdings,
                boundary=boundary,
                direction=direction,
                first_step=FIRST_STEP,
                last_step=LAST_STEP,
                num_microbatches=num_microbatches,
            )
            by_step = {
                step: supply
                for supply in supplies
                for step in range(supply.first_step, supply.last_step + 1)
            }
            assert sum(s.last_step - s.first_step + 1 for s in supplies) == len(by_step)
            for step in STEPS:
                attempt = newest_whole(holdings, boundary, direction, step, num_microbatches)
                assert (by_step[step].attempt if step in by_step else None) == attempt
                for microbatch, worker in by_step[step].holders.items() if attempt else ():
                    assert any(
                        holds(run, boundary, direction, step)
                        and run.attempt == attempt
                        and microbatch in run.microbatches
                        for run in holdings[worker]
                    )
            assert set(by_step) <= set(STEPS)
