from __future__ import annotations

import inspect

from everstep.schedule import grid
from everstep.schedule.fixed import one_f_one_b
from everstep.schedule.planner import plan
from everstep.schedule.routing import _route_stage, route
from problems import problem


def test_one_f_one_b_is_as_its_picture_shows() -> None:
    picture = [
        f"stage {stage}   "
        + " ".join(
            f"{'FB'[kind]}{microbatch}"
            for kind, microbatch in one_f_one_b(stage, num_stages=3, num_microbatches=4)
        )
        for stage in range(3)
    ]
    documented = inspect.getdoc(one_f_one_b) or ""
    assert "\n".join(picture) in documented


def test_routing_is_as_its_picture_shows() -> None:
    adopted = route(problem((3, 4, 6), [(1, 0)]))[0][6:12]
    assert " ".join(map(str, adopted)) + "     (on stage 0)" in (inspect.getdoc(_route_stage) or "")


def test_an_adopted_micro_batch_carries_its_replica_in_the_grid() -> None:
    text = grid.render_grid(plan(problem((3, 2, 2), [(2, 0)])))
    assert "²" in text
    assert "2:0  lost" in text
