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
    return max(_stage_bound(work, stage) for stage in range(work.stages)) + work.synchronization


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


def _stage_bound(work: Workload, stage: int) -> int:
    load = work.largest_load[stage]
    held = min(load, work.limit[stage])
    forward = work.forward[stage]
    per_microbatch = forward + work.input_gradient[stage] + work.weight_gradient[stage]
    round_trip = _round_trip(work, stage)
    window = load * per_microbatch + max(0, round_trip - held * forward)
    stay = round_trip + work.input_gradient[stage] + work.weight_gradient[stage]
    window = max(window, -(-load // held) * stay)
    # Glued, W is over when the gradient leaves, so there is nothing left to do after the last B.
    left_for_later = 0 if work.is_glued else held * work.weight_gradient[stage]
    around = [window - left_for_later + _detour(work, first, stage) for first in range(stage)]
    if not work.is_staggered:
        return max([_way_there(work, 0, stage) + window, *around[:1]])
    return max([window, *around])


def _round_trip(work: Workload, stage: int) -> int:
    """From the first F of a worker of `stage` until its first B can start."""
    forwards = sum(work.forward[stage:])
    gradients = sum(work.gradient_delay(later) for later in range(stage + 1, work.stages))
    return forwards + gradients + 2 * work.transfer * (work.stages - 1 - stage)


def _way_there(work: Workload, first: int, last: int) -> int:
    return sum(work.forward[first:last]) + work.transfer * (last - first)


def _detour(work: Workload, first: int, last: int) -> int:
    """What the window of `first` holds besides the window of `last`: the way there and back."""
    back = sum(work.gradient_delay(stage) for stage in range(first, last))
    final_weight = 0 if work.is_glued else work.weight_gradient[first]
    return _way_there(work, first, last) + back + work.transfer * (last - first) + final_weight
