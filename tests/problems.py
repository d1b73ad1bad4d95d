"""Planning problems for tests: short to write, random to draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from everstep.core.ids import WorkerId
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.problem import Problem, Variant

ADAPTIVE = [variant for variant in Variant if variant is not Variant.ONE_F_ONE_B]


def problem(
    shape: tuple[int, int, int] = (3, 4, 6),
    lost: Iterable[tuple[int, int]] = (),
    *,
    in_flight: tuple[int | None, ...] | None = None,
    variant: Variant = Variant.DECOUPLED_STAGGERED,
    durations: Durations | None = None,
) -> Problem:
    replicas, stages, microbatches = shape
    return Problem(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        lost=frozenset(WorkerId(*place) for place in lost),
        durations=durations or Durations.uniform(stages),
        in_flight=in_flight,
        variant=variant,
    )


def _times() -> st.SearchStrategy[float]:
    return st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 0.0137, 1 / 3])


@st.composite
def durations(draw: st.DrawFn, stages: int) -> Durations:
    if draw(st.booleans()):
        return Durations.uniform(stages)
    each = [
        StageDurations(
            forward=draw(_times()),
            # A measured stage 0 has no input gradient to compute.
            input_gradient=0.0 if number == 0 and draw(st.booleans()) else draw(_times()),
            weight_gradient=draw(_times()),
        )
        for number in range(stages)
    ]
    loose = st.sampled_from([0.0, 0.2, 0.5])
    return Durations(
        stages=tuple(each), transfer=draw(loose), reduction=draw(loose), optimizer=draw(loose)
    )


@st.composite
def problems(draw: st.DrawFn, variants: Sequence[Variant] = ADAPTIVE) -> Problem:
    """Any shape up to 5 x 5 x 8, any losses that leave each stage a worker, any limits."""
    replicas, stages = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lost = []
    for stage in range(stages):
        most = replicas - 1
        hit = draw(st.sets(st.integers(0, replicas - 1), max_size=min(most, 2)))
        lost += [(replica, stage) for replica in hit]
    limits = None
    if draw(st.booleans()):
        each = st.one_of(st.none(), st.integers(1, stages + 2))
        limits = tuple(draw(st.lists(each, min_size=stages, max_size=stages)))
    return problem(
        (replicas, stages, draw(st.integers(1, 8))),
        lost,
        in_flight=limits,
        variant=draw(st.sampled_from(variants)),
        durations=draw(durations(stages)),
    )
