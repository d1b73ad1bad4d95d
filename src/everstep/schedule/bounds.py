"""Lower bounds on the period: no plan can be faster, so a plan that reaches one is optimal.

Look at the busiest worker of stage s. It runs n micro-batches (n from an even spread) and holds at
most L of them between F and W. From its first F it takes at least

    round trip         before its first B can start; until then it can only run F, at most L of them
    n * (F + B + W)    its work

so its window is at least `n * (F + B + W) + max(0, round trip - L * F)`. After its last B at most L
pieces of W are left to do, and an earlier stage j can only end its window when the gradient has
travelled on to it. So the window of j holds

    F of j .. s-1  |  the window above, less L * W  |  B of s-1 .. j, then W of j

A window also lasts at least `ceil(n / L)` times as long as one micro-batch stays in memory.
"""

from __future__ import annotations

from everstep.schedule.workload import Workload


def lower_bound(work: Workload) -> int:
    """In ticks; holds for every route and order that keeps live workers' own micro-batches."""
    return max(stage_bound(work, stage, num_live=live) for stage, live in enumerate(work.num_live))


def load_bound(work: Workload) -> int:
    """The part of the bound that counts work alone, `max_s ceil(D*M / live_s) * (F + B + W)`."""
    return max(
        load * (forward + gradient + weight)
        for load, forward, gradient, weight in zip(
            work.largest_load, work.forward, work.input_gradient, work.weight_gradient, strict=True
        )
    )


def nearly(work: Workload, bound: int) -> int:
    """The longest period that counts as near the bound: two slots above it, or 2 %. A slot is the
    longest F, B or W."""
    slot = max(*work.forward, *work.input_gradient, *work.weight_gradient)
    return bound + max(2 * slot, bound // 50)


def stage_bound(work: Workload, stage: int, *, num_live: int) -> int:
    """What one stage with so many live workers contributes; the largest is the bound of all."""
    return _window(work, stage, load=-(-work.num_jobs // num_live)) + work.synchronization


def _window(work: Workload, stage: int, *, load: int) -> int:
    held = min(load, work.limit[stage])
    forward = work.forward[stage]
    per_microbatch = forward + work.input_gradient[stage] + work.weight_gradient[stage]
    round_trip = _round_trip(work, stage)
    window = load * per_microbatch + max(0, round_trip - held * forward)
    stay = round_trip + work.input_gradient[stage] + work.weight_gradient[stage]
    window = max(window, -(-load // held) * stay)
    # Glued, W is over when the gradient leaves, so there is nothing left to do after the last B.
    left_for_later = 0 if work.is_glued else held * work.weight_gradient[stage]
    detours = _detours(work, stage)
    if not work.is_staggered:
        before = sum(work.forward[:stage]) + work.transfer * stage
        return max([before + window, *(window - left_for_later + d for d in detours[-1:])])
    return max(window, window - left_for_later + max(detours, default=0))


def _round_trip(work: Workload, stage: int) -> int:
    """From the first F of a worker of `stage` until its first B can start."""
    forwards = sum(work.forward[stage:])
    gradients = sum(work.gradient_delay(later) for later in range(stage + 1, work.stages))
    return forwards + gradients + 2 * work.transfer * (work.stages - 1 - stage)


def _detours(work: Workload, last: int) -> list[int]:
    """For every earlier stage, the nearest first: what its window holds besides that of `last`, the
    way there and back."""
    way, detours = 0, []
    for first in reversed(range(last)):
        way += work.forward[first] + work.gradient_delay(first) + 2 * work.transfer
        detours.append(way + (0 if work.is_glued else work.weight_gradient[first]))
    return detours
