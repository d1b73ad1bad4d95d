"""The live job as JSON: what `GET /status` answers and `everstep status --json` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.events import Event
from everstep.membership.roster import Worker
from everstep.membership.world import World


def describe(world: World, *, address: str, events: Sequence[Event]) -> dict[str, object]:
    return {
        "address": address,
        "replicas": world.shape.replicas,
        "stages": world.shape.stages,
        "steps": None if world.job is None else world.job.steps,
        "finished_step": world.ledger.open_step - 1,
        "generation": world.generation,
        "plan": _plan(world),
        "workers": [_worker(worker) for worker in world.roster.workers.values()],
        "agents": [
            {"host": agent.host, "workers": len(agent.seats), "connected": agent.is_here}
            for agent in world.roster.agents.values()
        ],
        "outcome": None if world.outcome is None else world.outcome.why,
        "events": list(events),
    }


def _plan(world: World) -> dict[str, object] | None:
    if world.plan is None:
        return None
    return {
        "period": world.plan.period,
        "bound": world.plan.lower_bound,
        "unit": world.unit,
    }


def _worker(worker: Worker) -> dict[str, object]:
    replica, stage = worker.place if worker.place is not None else (None, None)
    return {
        "replica": replica,
        "stage": stage,
        "pid": worker.hello.pid,
        "host": worker.hello.host,
        "state": str(worker.state),
        "step": worker.finished_step,
    }
