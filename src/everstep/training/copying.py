"""A stage's state from one of its live workers to another: a new one, or one that is a step behind.

Who is one step behind has the state before it: it needs no more than that step's gradients.
"""

from __future__ import annotations

from everstep.comm.channels import Channels
from everstep.core.ids import WorkerId
from everstep.core.points import Point, passing
from everstep.recovery.transfer import (
    receive_gradients,
    receive_state_copy,
    send_gradients,
    send_state_copy,
)
from everstep.training.holding import Holding
from everstep.training.orders import Orders


def copy_states(holding: Holding, orders: Orders, channels: Channels) -> bool:
    """This worker's part in the copies of a generation. Whether it got one itself: its state is
    then that after the step before the next."""
    is_target = False
    step = orders.step - 1
    for copy in orders.copies:
        if holding.me not in (copy.source, copy.target):
            continue
        passing(Point.BEFORE_COPY, step=step)
        if copy.source == holding.me:
            _give(holding, orders, channels, to=copy.target)
        else:
            _take(holding, orders, channels, source=copy.source)
            is_target = True
        passing(Point.AFTER_COPY, step=step)
    return is_target


def _give(holding: Holding, orders: Orders, channels: Channels, *, to: WorkerId) -> None:
    if orders.is_copied_step_open:
        send_gradients(holding.stage.buckets.buffers, channels, to=to)
    else:
        send_state_copy(holding.state(), channels, to=to)


def _take(holding: Holding, orders: Orders, channels: Channels, *, source: WorkerId) -> None:
    if orders.is_copied_step_open:
        receive_gradients(holding.stage.buckets.buffers, channels, source=source)
        holding.update.follow()
    else:
        receive_state_copy(holding.state(), channels, source=source)
