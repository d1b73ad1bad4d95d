"""The live job as JSON: what `GET /status` answers and `everstep status --json` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.events import Event
from everstep.membership.planbook import PlanBook
from everstep.membership.roster import Worker
from everstep.membership.wording import who
from everstep.membership.world import World


def describe(world: World, *, address: str, events: Sequence[Event]) -> dict[str, object]:
    return {
        "address": address,
        "replicas": world.shape.replicas,
        "stages": world.shape.stages,
        "steps": None if world.job is None else world.job.steps,
        "finished_step": world.ledger.open_step - 1,
        "generation": world.generation,
        "plan": _plan(world.plans),
        "workers": [_worker(worker) for worker in world.roster.workers.values()],
        "agents": [
            {"host": agent.host, "workers": len(agent.seats), "connected": agent.is_here}
            for agent in world.roster.agents.values()
        ],
        "outcome": None if world.outcome is None else world.outcome.why,
        "events": list(events),
    }


def _plan(plans: PlanBook) -> dict[str, object] | None:
    if plans.plan is None:
        return None
    return {"period": plans.plan.period, "bound": plans.plan.lower_bound, "unit": plans.unit}


def _worker(worker: Worker) -> dict[str, object]:
    return {
        **who(worker),
        "host": worker.hello.host,
        "state": str(worker.state),
        "step": worker.finished_step,
    }
