"""Plans as JSON, and profiles from JSON.

The plan document is a stable contract (docs/reference.md). Reading one back gives an equal plan:
peers and channels follow from who runs what, so they are derived, then checked.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from everstep.core.errors import ConfigError
from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind
from everstep.schedule.check import require_valid
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.plan import Baselines, Plan, peers_of, sending_order
from everstep.schedule.problem import Problem, Variant

FORMAT = 1
"""Raised when a field changes its meaning; new fields do not raise it."""

Json = dict[str, Any]


def plan_to_json(plan: Plan) -> Json:
    return {
        "format": FORMAT,
        **problem_to_json(plan.problem),
        "period": plan.period,
        "makespan": plan.makespan,
        "lower_bound": plan.lower_bound,
        "load_bound": plan.load_bound,
        "gap_fraction": plan.gap_fraction,
        "proved_optimal": plan.is_proved_optimal,
        "peak_in_flight": list(plan.peak_in_flight),
        "baselines": {
            "one_f_one_b": plan.baselines.one_f_one_b,
            "decoupled": plan.baselines.decoupled,
            "fault_scaled": plan.baselines.fault_scaled,
        },
        "workers": [
            {
                "replica": worker.replica,
                "stage": worker.stage,
                "actions": [
                    {
                        "kind": str(action.kind),
                        "replica": action.replica,
                        "microbatch": action.microbatch,
                        "start": action.start,
                        "end": action.end,
                    }
                    for action in row
                ],
            }
            for worker, row in sorted(plan.actions.items())
        ],
        "channels": [
            {
                "from": list(channel.sender),
                "to": list(channel.receiver),
                "kind": str(channel.kind),
                "microbatches": [list(microbatch) for microbatch in order],
            }
            for channel, order in sorted(plan.channels.items())
        ],
    }


def problem_to_json(problem: Problem) -> Json:
    return {
        "replicas": problem.replicas,
        "stages": problem.stages,
        "microbatches": problem.microbatches,
        "lost": [list(worker) for worker in sorted(problem.lost)],
        "variant": str(problem.variant),
        "durations": msgspec.to_builtins(problem.durations),
        "in_flight": None if problem.in_flight is None else list(problem.in_flight),
    }


def plan_from_json(document: Json) -> Plan:
    """Reads what `plan_to_json` wrote and proves it again: a file may have been edited."""
    if document.get("format") != FORMAT:
        raise ConfigError("format", document.get("format"), f"this version reads format {FORMAT}")
    in_flight = document["in_flight"]
    problem = Problem(
        replicas=document["replicas"],
        stages=document["stages"],
        microbatches=document["microbatches"],
        lost=frozenset(WorkerId(*place) for place in document["lost"]),
        durations=_durations_from_json(document["durations"]),
        in_flight=None if in_flight is None else tuple(in_flight),
        variant=Variant(document["variant"]),
    )
    actions = _actions_from_json(document["workers"])
    return require_valid(
        Plan(
            problem=problem,
            actions=actions,
            channels=sending_order(actions),
            period=document["period"],
            makespan=document["makespan"],
            lower_bound=document["lower_bound"],
            load_bound=document["load_bound"],
            is_proved_optimal=document["proved_optimal"],
            peak_in_flight=tuple(document["peak_in_flight"]),
            baselines=Baselines(**document["baselines"]),
        )
    )


def _actions_from_json(workers: list[Json]) -> dict[WorkerId, tuple[Action, ...]]:
    runs_on = {
        (entry["stage"], action["replica"], action["microbatch"]): WorkerId(
            entry["replica"], entry["stage"]
        )
        for entry in workers
        for action in entry["actions"]
    }
    actions: dict[WorkerId, tuple[Action, ...]] = {}
    for entry in workers:
        worker = WorkerId(entry["replica"], entry["stage"])
        row = []
        for action in entry["actions"]:
            kind, stage = Kind(action["kind"]), worker.stage
            replica, microbatch = action["replica"], action["microbatch"]
            before = runs_on.get((stage - 1, replica, microbatch))
            after = runs_on.get((stage + 1, replica, microbatch))
            peers = peers_of(kind, before=before, after=after, nobody=None)
            row.append(
                Action(
                    kind, stage, replica, microbatch, worker, *peers, action["start"], action["end"]
                )
            )
        actions[worker] = tuple(row)
    return actions


def _durations_from_json(document: Json) -> Durations:
    return Durations(
        stages=tuple(StageDurations(**stage) for stage in document["stages"]),
        transfer=document["transfer"],
        reduction=document["reduction"],
        optimizer=document["optimizer"],
    )


_STAGE_KEYS = ("forward", "input_gradient", "weight_gradient", "in_flight")
_PROFILE_KEYS = ("stages", "transfer", "reduction", "optimizer")


def profile_from_json(text: str) -> tuple[Durations, tuple[int | None, ...] | None]:
    """Per-stage durations and in-flight limits, as written by hand or measured by a live job.

    {"stages": [{"forward": 1, "input_gradient": 0, "weight_gradient": 2, "in_flight": 4}, ...],
     "transfer": 0.1, "reduction": 0.2, "optimizer": 0.3}
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("profile", f"no JSON at line {error.lineno}", error.msg) from None
    top = _object("profile", document, known=_PROFILE_KEYS)
    entries = top.get("stages")
    if not isinstance(entries, list) or not entries:
        raise ConfigError("profile.stages", entries, "must be a list with one object per stage")
    stages, limits = [], []
    for number, entry in enumerate(entries):
        path = f"profile.stages[{number}]"
        fields = _object(path, entry, known=_STAGE_KEYS)
        times = {key: _number(f"{path}.{key}", fields.get(key)) for key in _STAGE_KEYS[:3]}
        stages.append(StageDurations(**times))
        limits.append(_limit(f"{path}.in_flight", fields.get("in_flight")))
    loose = {key: _number(f"profile.{key}", top.get(key, 0)) for key in _PROFILE_KEYS[1:]}
    has_limits = any(limit is not None for limit in limits)
    return Durations(stages=tuple(stages), **loose), tuple(limits) if has_limits else None


def _object(path: str, value: object, *, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(path, value, "must be an object")
    for key in value:
        if key not in known:
            _reject_unknown(f"{path}.{key}", key, known)
    return value


def _reject_unknown(path: str, key: str, known: tuple[str, ...]) -> NoReturn:
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    raise ConfigError(path, "not a known key", hint)


def _number(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(path, value, "must be a number")
    return float(value)


def _limit(path: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(path, value, "must be a whole number, or absent for no limit")
