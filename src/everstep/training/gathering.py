"""The whole model's weights, on the reporter."""

from __future__ import annotations

from torch import Tensor

from everstep.execute.gather import receive_state, send_state
from everstep.execute.links import Links
from everstep.execute.reduction import sum_over
from everstep.training.holding import Holding
from everstep.training.orders import Orders


def gather(holding: Holding, orders: Orders, links: Links) -> dict[str, Tensor]:
    """Copies on the processor; empty on all but the reporter. Every worker takes part."""
    *others, last = range(holding.stage.num_stages)
    reporter = orders.lead(last)
    found: dict[str, Tensor] = {}
    if holding.me == reporter:
        if others:
            assert links.channels is not None
            names = {orders.lead(x): list(holding.stages[x].names.values()) for x in others}
            found = receive_state(links.channels, names)
        found |= holding.stage.module.state_dict()
    elif holding.me == orders.lead(holding.me.stage):
        assert links.channels is not None
        send_state(holding.stage.module, links.channels, to=reporter)
    # All leave together, so that nobody is more than one operation ahead of another.
    sum_over(links.world, [0.0])
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}
